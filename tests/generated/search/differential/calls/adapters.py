"""Adapters of PEFT: loaded, switched, merged, swapped, saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny_adapters
from tests.generated.search.differential.table import EVERYWHERE, LORA, LORAS, Area, Expect
from tests.generated.search.differential.world import World

area = Area("adapters")
BASES = ("E2B", "E2B-4bit", "12B", "E2B-text")
MERGED = ("E2B-lora", "12B-lora", "31B-lora", "E2B-text-lora")


def second(world: World) -> Path:
    """Another adapter of the kind's shape."""

    def own_second(folder: Path, of: str) -> None:
        import shutil

        from safetensors.torch import load_file, save_file

        shutil.copytree(world.adapter(), folder, dirs_exist_ok=True)
        weights = load_file(folder / "adapter_model.safetensors")
        save_file({n: v.flip(0) * 0.7 for n, v in weights.items()}, folder / "adapter_model.safetensors")

    return world.workspace.cached(own_second, of="text" if world.text_class else "language")


@area.call(
    variants={
        "": {},
        "trainable": {"is_trainable": True},
        "named": {"adapter_name": "own"},
        "low_cpu": {"low_cpu_mem_usage": True},
        "no_autocast": {"autocast_adapter_dtype": False},
        "torch_device": {"torch_device": "cpu"},
        "ephemeral": {"ephemeral_gpu_offload": True},
    },
    kinds=BASES,
)
def peft_load(world: World, **options: Any) -> Any:
    """``PeftModel.from_pretrained``"""
    model = world.with_adapter(world.model, **options)
    return [world.logits(model), sum(value.requires_grad for value in model.parameters())]


@area.call(
    variants={"": {}, "named": {"adapter_name": "own"}, "trainable": {"is_trainable": True}},
    kinds=BASES,
    places=EVERYWHERE,
)
def model_load(world: World, **options: Any) -> Any:
    """``model.load_adapter``"""
    world.model.load_adapter(str(world.adapter()), **options)
    return world.logits()


@area.call(variants=["folder", "empty", "name", "file", "config", "same_name", "rank", "truncated"], kinds=("E2B",))
def bad_model_load(world: World, how: str) -> Any:
    """``model.load_adapter`` of what cannot be loaded: the type of the error"""
    world.model.load_adapter(_bad(world, how))
    if how == "same_name":
        world.model.load_adapter(_bad(world, how))
    return None


@area.call(variants=["folder", "empty", "name", "file", "config", "same_name", "rank", "truncated"], kinds=("E2B",))
def bad_peft_load(world: World, how: str) -> Any:
    """``PeftModel.from_pretrained`` of what cannot be loaded: the type of the error"""
    from peft import PeftModel

    model = PeftModel.from_pretrained(world.model, _bad(world, how))
    if how == "same_name":
        model.load_adapter(_bad(world, how), adapter_name="default")
    return None


def _bad(world: World, how: str) -> str:
    import shutil

    folder = Path(world.new_folder())
    if how == "folder":
        return str(folder / "no" / "such")
    if how == "empty":
        return str(folder)
    if how == "name":
        return "no such name!"
    if how == "same_name":
        return str(world.adapter())
    if how == "rank":
        return str(world.workspace.mismatched_adapter())
    shutil.copytree(world.adapter(), folder, dirs_exist_ok=True)
    if how == "file":
        (folder / "adapter_model.safetensors").unlink()
    elif how == "config":
        (folder / "adapter_config.json").write_text("{")
    else:
        with (folder / "adapter_model.safetensors").open("r+b") as file:
            file.truncate(100)
    return str(folder)


@area.call(kinds=BASES)
def add_adapter(world: World) -> Any:
    """``model.add_adapter(config)``, a step"""
    import peft
    import torch

    torch.manual_seed(0)
    world.model.add_adapter(peft.LoraConfig(r=4, target_modules=_linears(world), init_lora_weights=False))
    return world.logits()


def _linears(world: World) -> str:
    return r".*\.layers\.\d+\.(self_attn\.q_proj|mlp\.up_proj)" if world.text_class else tiny_adapters.SOME_LINEARS


@area.call(kinds=LORAS)
def two_adapters(world: World) -> Any:
    """``load_adapter``, ``set_adapter``, ``active_adapter``, ``delete_adapter``"""
    model = world.model
    model.load_adapter(str(second(world)), adapter_name="second")
    shown = [world.logits()]
    model.set_adapter("second")
    shown += [world.logits(), str(model.active_adapter)]
    model.delete_adapter("default")
    return [*shown, world.logits(), sorted(model.peft_config)]


@area.call(
    variants=["peft", "transformers"],
    kinds=("E2B-lora", "E2B-4bit-lora", "12B-lora", "E2B-text-lora"),
    places=EVERYWHERE,
)
def disabled(world: World, way: str) -> Any:
    """``disable_adapter()``, ``disable_adapters()``"""
    if way == "peft":
        with world.model.disable_adapter():
            off = world.logits()
        return [off, world.logits()]
    world.__dict__["model"] = model = world.dispatch(world.fresh())
    model.load_adapter(str(world.adapter()))
    model.disable_adapters()
    off = world.logits(model)
    model.enable_adapters()
    return [off, world.logits(model), model.active_adapters()]


@area.call(variants=["absent", "empty", "type"], kinds=LORA)
def set_bad_adapter(world: World, how: str) -> Any:
    """``set_adapter`` of an adapter that is not there"""
    world.model.set_adapter({"absent": "absent", "empty": [], "type": None}[how])
    return None


@area.call(variants=["delete", "disable_base"], kinds=LORA)
def delete_bad_adapter(world: World, how: str) -> Any:
    """``delete_adapter`` of an adapter that is not there"""
    (world.model if how == "delete" else world.base).delete_adapter("absent")
    return None


@area.call(kinds=(*MERGED, "E2B-4bit-lora", "E2B-8bit-lora"), places=EVERYWHERE)
def merge_adapter(world: World) -> Any:
    """``merge_adapter()``: it answers"""
    world.model.merge_adapter()
    return world.logits()


@area.call(kinds=MERGED)
def unmerge_adapter(world: World) -> Any:
    """``merge_adapter()``, ``unmerge_adapter()``"""
    world.model.merge_adapter()
    world.model.unmerge_adapter()
    return world.logits()


@area.call(
    variants={"": {}, "safe": {"safe_merge": True}, "progress": {"progressbar": True}},
    kinds=(*MERGED, "E2B-4bit-lora", "E2B-8bit-lora"),
    places=EVERYWHERE,
)
def merge_and_unload(world: World, **options: Any) -> Any:
    """``merge_and_unload()``: it answers"""
    return world.logits(world.model.merge_and_unload(**options))


@area.call(kinds=(*MERGED, "E2B-4bit-lora"), places=EVERYWHERE)
def merged_and_saved(world: World) -> Any:
    """``merge_and_unload()``, ``save_pretrained``, ``from_pretrained``"""
    merged = world.model.merge_and_unload()
    right = world.logits(merged)
    folder = world.new_folder()
    merged.save_pretrained(folder)
    return Expect(world.logits(world.cls.from_pretrained(folder, dtype="auto").eval()), right)


@area.call(variants=["lm_head", "embed_tokens", "both"], kinds=("E2B", "12B", "E2B-text"), places=EVERYWHERE)
def merged_tied(world: World, what: str) -> Any:
    """A LoRA on the head or the embedding: merged, saved, loaded"""
    import peft
    import torch

    targets = {"lm_head": ["lm_head"], "embed_tokens": ["embed_tokens"], "both": ["lm_head", "embed_tokens"]}[what]
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(world.model, config).eval()
    before = world.logits(model, media=False)
    folder = world.new_folder()
    model.merge_and_unload().save_pretrained(folder)
    after = world.logits(world.cls.from_pretrained(folder, dtype="auto").eval(), media=False)
    return Expect(float((after - before).abs().max()) < 0.25 * float(before.abs().max()), True)


@area.call(kinds=(*MERGED, "E2B-4bit-lora"))
def unload(world: World) -> Any:
    """``unload()``"""
    return world.logits(world.model.unload())


@area.call(
    variants=["linear", "cat", "svd", "ties", "ties_svd", "dare_linear", "magnitude_prune"],
    kinds=("E2B-lora", "E2B-4bit-lora"),
)
def weighted(world: World, combination: str) -> Any:
    """``add_weighted_adapter``"""
    import torch

    model = world.model
    model.load_adapter(str(second(world)), adapter_name="second")
    given = {} if combination in ("linear", "cat", "svd") else {"density": 0.5}
    torch.manual_seed(0)
    model.add_weighted_adapter(["default", "second"], [0.7, 0.3], "both", combination_type=combination, **given)
    model.set_adapter("both")
    return world.logits()


@area.call(
    variants=["", "prepared"], kinds=("E2B-lora", "E2B-4bit-lora", "12B-lora", "E2B-text-lora"), places=EVERYWHERE
)
def hotswap(world: World, how: str) -> Any:
    """``hotswap_adapter``"""
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    if how == "prepared":
        prepare_model_for_compiled_hotswap(world.model, target_rank=8)
    before = world.logits()
    hotswap_adapter(world.model, str(second(world)), adapter_name="default", torch_device="cpu")
    return [before, world.logits()]


@area.call(kinds=("E2B",))
def hotswap_transformers(world: World) -> Any:
    """``model.load_adapter(hotswap=True)``"""
    import inspect

    world.needs("hotswap" in inspect.signature(world.model.load_adapter).parameters, "no hotswap")
    world.model.enable_peft_hotswap(target_rank=8)
    world.model.load_adapter(str(world.adapter()))
    before = world.logits()
    world.model.load_adapter(str(second(world)), adapter_name="default", hotswap=True)
    return [before, world.logits()]


@area.call(kinds=("E2B-lora", "E2B-4bit-lora"))
def mixed_batch(world: World) -> Any:
    """``adapter_names=`` for each row"""
    import torch

    world.model.load_adapter(str(second(world)), adapter_name="second")
    with torch.no_grad():
        batch = world.inputs(media=False, batch=3)
        forward = world.model(**batch, adapter_names=["default", "second", "__base__"]).logits
        given = {"max_new_tokens": 3, "do_sample": False, "min_new_tokens": 3}
        return [forward, world.model.generate(**batch, adapter_names=["default", "second", "__base__"], **given)]


@area.call(variants=["from_pretrained", "load", "get"], kinds=("E2B", "E2B-text", "12B"))
def mixed_model(world: World, how: str) -> Any:
    """``PeftMixedModel``"""
    import peft
    import torch

    if how == "get":
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=_linears(world), init_lora_weights=False)
        return world.logits(peft.get_peft_model(world.model, config, mixed=True).eval())
    model = peft.PeftMixedModel.from_pretrained(world.model, str(world.adapter()))
    if how == "load":
        model.load_adapter(str(second(world)), adapter_name="second")
        model.set_adapter(["default", "second"])
    return world.logits(model.eval())


@area.call(variants=["AutoPeftModelForCausalLM", "AutoPeftModel"], kinds=("E2B", "E2B-text"), places=("one",))
def auto_peft(world: World, name: str) -> Any:
    """``AutoPeftModel.from_pretrained``"""
    import peft
    import torch

    model = getattr(peft, name).from_pretrained(world.adapter(), dtype=torch.bfloat16)
    return [type(model).__name__, world.logits(model.eval(), media=False)]


@area.call(variants=["get_model_status", "get_layer_status", "nb", "inject", "config", "modules"], kinds=LORA)
def asked(world: World, what: str) -> Any:
    """What PEFT says of an adapter"""
    import peft

    model = world.model
    if what == "get_model_status":
        found = model.get_model_status()
        return [found.base_model_type, found.num_adapter_layers, found.trainable_params, found.total_params]
    if what == "get_layer_status":
        return [[item.name, item.module_type, item.enabled, item.devices] for item in model.get_layer_status()]
    if what == "nb":
        return model.get_nb_trainable_parameters()
    if what == "config":
        return sorted(peft.PeftConfig.from_pretrained(world.adapter()).to_dict())
    if what == "modules":
        return sorted(model.targeted_module_names)
    plain = world.workspace.load()
    return sorted(dict(peft.inject_adapter_in_model(model.peft_config["default"], plain).named_parameters()))[:50]


TUNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4}),
    "dora": ("LoraConfig", {"r": 4, "use_dora": True}),
    "rslora": ("LoraConfig", {"r": 4, "use_rslora": True}),
    "pissa": ("LoraConfig", {"r": 4, "init_lora_weights": "pissa"}),
    "olora": ("LoraConfig", {"r": 4, "init_lora_weights": "olora"}),
    "gaussian": ("LoraConfig", {"r": 4, "init_lora_weights": "gaussian"}),
    "orthogonal": ("LoraConfig", {"r": 4, "init_lora_weights": "orthogonal"}),
    "rank_pattern": ("LoraConfig", {"r": 4, "rank_pattern": {"mlp.up_proj": 2}}),
    "some_layers": ("LoraConfig", {"r": 4, "layers_to_transform": [0, 2], "target_modules": ["q_proj"]}),
    "dropout": ("LoraConfig", {"r": 4, "lora_dropout": 0.1}),
    "all-linear": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "suffix": ("LoraConfig", {"r": 4, "target_modules": ["o_proj", "down_proj"]}),
    "head_saved": ("LoraConfig", {"r": 4, "modules_to_save": ["lm_head"]}),
    "embedding_saved": ("LoraConfig", {"r": 4, "modules_to_save": ["embed_tokens"]}),
    "norm_saved": ("LoraConfig", {"r": 4, "modules_to_save": ["input_layernorm"]}),
    "adalora": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}),
    "ia3": ("IA3Config", {"feedforward_modules": r".*up_proj"}),
    "loha": ("LoHaConfig", {"r": 4}),
    "lokr": ("LoKrConfig", {"r": 4}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 32}),
    "boft": ("BOFTConfig", {"boft_block_size": 4}),
    "vera": ("VeraConfig", {"r": 4}),
    "randlora": ("RandLoraConfig", {"r": 8}),
    "ln": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "fourier": ("FourierFTConfig", {"n_frequency": 50}),
    "hra": ("HRAConfig", {"r": 4}),
    "miss": ("MissConfig", {"r": 8}),
    "bone": ("BoneConfig", {"r": 8}),
    "shira": ("ShiraConfig", {"r": 4}),
    "c3a": ("C3AConfig", {"block_size": 32}),
    "road": ("RoadConfig", {"group_size": 32}),
    "vblora": ("VBLoRAConfig", {"vector_length": 32, "num_vectors": 16}),
    "tokens": ("TrainableTokensConfig", {"token_indices": [3, 7], "target_modules": ["embed_tokens"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
    "p_tuning": (
        "PromptEncoderConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM", "encoder_hidden_size": 32}
    ),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
    "cartridge": ("CartridgeConfig", {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}),
    "adaption_prompt": ("AdaptionPromptConfig", {"adapter_len": 4, "adapter_layers": 2, "task_type": "CAUSAL_LM"}),
    "unknown_target": ("LoraConfig", {"r": 4, "target_modules": ["no_such_module"]}),
    "clipped_target": ("LoraConfig", {"r": 4, "target_modules": r".*tower.*\.q_proj"}),
}  # fmt: skip


def tuned(world: World, tuner: str, model: Any = None) -> Any:
    import peft
    import torch

    kind, fields = TUNERS[tuner]
    world.needs(hasattr(peft, kind), f"no {kind}")
    no_targets = ("Prompt" in kind or "Prefix" in kind or "Cartridge" in kind) and "target_modules" not in fields
    fields = fields if no_targets or "target_modules" in fields else {"target_modules": _linears(world), **fields}
    torch.manual_seed(0)
    return peft.get_peft_model(world.model if model is None else model, getattr(peft, kind)(**fields))


@area.call(variants=list(TUNERS), kinds=("E2B", "E2B-text"))
def tuner(world: World, tuner: str) -> Any:
    """A tuner: a step, switched off, saved, loaded"""
    import torch

    model = tuned(world, tuner)
    model.train(tuner == "dropout")
    torch.manual_seed(0)
    shown: list[Any] = [world.train_step(model, media=tuner == "clipped_target", learning_rate=0.5)]
    model.eval()
    with torch.no_grad(), model.disable_adapter():
        shown.append(world.logits(model, media=False))
    before = world.logits(model, media=False)
    folder = world.new_folder()
    model.save_pretrained(folder)
    fresh = world.workspace.load_text() if world.text_class else world.workspace.load()
    again = world.with_adapter(world.dispatch(fresh), folder)
    return [*shown, before, world.logits(again, media=False)]


_QUANTIZED = (
    "lora",
    "dora",
    "ia3",
    "loha",
    "vera",
    "oft",
    "ln",
    "road",
    "adalora",
    "prompt",
    "prefix",
    "norm_saved",
    "all-linear",
)


@area.call(variants=_QUANTIZED, kinds=("E2B-4bit", "E2B-8bit"))
def tuner_quantized(world: World, tuner: str) -> Any:
    """A tuner on a quantized base: a step"""
    return world.train_step(tuned(world, tuner), media=False)


@area.call(
    variants=["lora", "dora", "loha", "ln", "oft", "ia3", "head_saved"], kinds=("E2B", "E2B-text"), places=EVERYWHERE
)
def tuner_merged(world: World, tuner: str) -> Any:
    """A tuner, merged"""
    import torch

    model = tuned(world, tuner).eval()
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(0.02)
    return world.logits(model.merge_and_unload(), media=False)


@area.call(variants=["prefix", "prompt", "cartridge", "ln", "lora"], kinds=("E2B", "E2B-text"))
def tuner_generates(world: World, tuner: str) -> Any:
    """A tuner, ``generate``: the tokens of whole forwards"""
    model = tuned(world, tuner).eval()
    return Expect(world.tokens(model, media=False), greedy(world, model))


def greedy(world: World, model: Any) -> Any:
    """Four tokens, each of a forward of all that is there: no cache."""
    import torch

    ids = world.inputs(media=False)["input_ids"]
    with torch.no_grad():
        for _ in range(4):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, -1:]
            ids = torch.cat([ids, logits.argmax(-1)], dim=1)
    return ids
