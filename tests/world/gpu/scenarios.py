"""What a user with a small card does, one scenario a process: ``python -m tests.world.gpu.scenarios NAME FOLDER
[SHAPE]``.

Each prints one line of JSON. ``build`` comes first; ``all_gpu`` writes the answers the others are compared with.
"""

from __future__ import annotations

from gemma4_compat._gemma4.quantization import opt_in

import gemma4_compat  # isort: skip  (first, as a user would; GEMMA4_COMPAT_DISABLE=all gives the unpatched stack)

import json
import sys
import time
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks as _placement
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny as _tiny
from gemma4_compat._lab import tiny_models
from gemma4_compat._lab.workspace import Outputs, difference

GIB = 2**30
TOWERS = ("model.vision_tower", "model.audio_tower")
PER_LAYER = "model.language_model.embed_tokens_per_layer"
ADAPTER = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)(\.linear)?"


def e2b_config() -> Any:
    """E2B's text shape; the towers at the configuration classes' defaults with clipped linears."""
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    text = gemma4.Gemma4TextConfig(
        vocab_size=262144,
        hidden_size=1536,
        intermediate_size=6144,
        use_double_wide_mlp=True,
        num_hidden_layers=35,
        num_kv_shared_layers=20,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        final_logit_softcapping=30.0,
    )
    return gemma4.Gemma4Config(
        text_config=text,
        vision_config=gemma4.Gemma4VisionConfig(use_clipped_linears=True),
        audio_config=gemma4.Gemma4AudioConfig(use_clipped_linears=True),
    )


def build(folder: Path) -> dict[str, Any]:
    """Random weights in E2B's shape, and a rank-16 adapter on the language model and both towers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4ForConditionalGeneration

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Gemma4ForConditionalGeneration(e2b_config())
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder / "checkpoint", max_shard_size="4GB")
    wrappers = {name for name, module in model.named_modules() if type(module).__name__ == "Gemma4ClippableLinear"}
    import re

    names = [name for name, _ in model.named_modules() if re.fullmatch(ADAPTER, name) and name not in wrappers]
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.02)
    adapted.save_pretrained(folder / "adapter")
    return {"parameters": sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)}


def base(folder: Path, placement: Any, *, quantization: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """4-bit (double quantization) language model, towers in bf16, as the thread's users load it.

    ``quantization`` says what is different.
    """
    import torch
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    settings = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
        "llm_int8_enable_fp32_cpu_offload": True,
        "llm_int8_skip_modules": [*TOWERS, "model.embed_vision", "model.embed_audio", "lm_head"],
    }
    return Gemma4ForConditionalGeneration.from_pretrained(
        folder / "checkpoint",
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(**settings | (quantization or {})),
        device_map=placement,
        **kwargs,
    ).eval()


def outputs(model: Any) -> Outputs:
    """Three forwards and a generate on a text prompt of 64 tokens, and the features of an image in the tower."""
    import torch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 250_000, (1, 64), generator=generator).to(0)
    side = torch.arange(12)
    positions = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, 144, 2).to(0)
    pixels = torch.rand(1, 144, 3 * 16 * 16, generator=generator).to(0)
    with torch.no_grad():
        logits = [model(input_ids=ids).logits.float().cpu() for _ in range(3)]
        tower = model.get_base_model() if hasattr(model, "get_base_model") else model
        features = tower.get_image_features(pixels, positions).pooler_output
        logits.append((features[0] if isinstance(features, (list, tuple)) else features).float().cpu())
        tokens = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False).cpu()
    return Outputs(tuple(logits), tokens)


def with_adapter(folder: Path, model: Any, *, free: float | None = None) -> dict[str, Any]:
    """Load the adapter and measure; with ``free`` GiB left on the card by a ballast tensor."""
    import torch
    from peft import PeftModel

    result: dict[str, Any] = {"base_gib": torch.cuda.memory_allocated() / GIB}
    ballast = None
    if free is not None:
        torch.cuda.empty_cache()
        ballast = torch.empty(max(0, int(torch.cuda.mem_get_info()[0] - free * GIB)), dtype=torch.uint8, device=0)
    held = 0 if ballast is None else ballast.numel() / GIB
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    adapted = PeftModel.from_pretrained(model, folder / "adapter")
    torch.cuda.synchronize()
    result["adapter_load_s"] = time.perf_counter() - started
    result["adapter_gib"] = torch.cuda.memory_allocated() / GIB - held
    result["adapter_load_peak_gib"] = torch.cuda.max_memory_allocated() / GIB - held
    result["map_entries"] = len(adapted.hf_device_map)
    devices = {
        str(parameter.device.type)
        for name, parameter in adapted.named_parameters()
        if any(tower.split(".")[1] in name for tower in TOWERS) and "lora_" not in name
    }
    result["towers_on"] = sorted(devices)
    seen = outputs(adapted)
    result["resident_gib"] = torch.cuda.memory_allocated() / GIB - held
    result["parity"] = difference(torch.load(folder / "answers.pt", weights_only=False), seen)
    return result


def all_gpu(folder: Path) -> dict[str, Any]:
    import torch
    from peft import PeftModel

    model = base(folder, {"": 0})
    before = torch.cuda.memory_allocated() / GIB
    adapted = PeftModel.from_pretrained(model, folder / "adapter")
    after = torch.cuda.memory_allocated() / GIB
    torch.save(outputs(adapted), folder / "answers.pt")
    return {"base_gib": before, "adapter_gib": after}


def split_towers(folder: Path) -> dict[str, Any]:
    return with_adapter(folder, base(folder, {**dict.fromkeys(TOWERS, "cpu"), "": 0}))


def split_towers_pressure(folder: Path) -> dict[str, Any]:
    return with_adapter(folder, base(folder, {**dict.fromkeys(TOWERS, "cpu"), "": 0}), free=3.0)


def catch_all(folder: Path) -> dict[str, Any]:
    """Everything on the GPU but the towers and the per-layer table, by a catch-all entry: what loading peaks at."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    model = base(folder, {"": 0, **dict.fromkeys(TOWERS, "cpu"), PER_LAYER: "cpu"})
    torch.cuda.synchronize()
    return {
        "resident_gib": torch.cuda.memory_allocated() / GIB,
        "load_peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "largest_block_gib": largest_block(model) / GIB,
        "table_gib": model.get_submodule(PER_LAYER).weight.nbytes / GIB,
    }


def largest_block(model: Any) -> int:
    """Bytes of the largest thing that is loaded at once: a parameter in bf16, before it is quantized."""
    return max(
        2 * parameter.numel() * (2 if type(parameter).__name__ == "Params4bit" else 1)
        for name, parameter in model.named_parameters()
        if parameter.device.type == "cuda"
    )


def all_on_the_host(model: Any) -> bool:
    """Nothing of it is on the GPU, nor brought there for a forward: upstream's map for a budget that is too small.

    Asking such a model takes minutes on the host's cores, and says nothing of a GPU.
    """
    return {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def max_memory(folder: Path) -> dict[str, Any]:
    """The smallest budget there is with ``device_map="auto"``, a tiny model with a large table, and an adapter.

    4-bit layers go to the CPU and are quantized on the GPU, because bitsandbytes' CPU kernels do not agree with those
    of the GPU on every scale: how many weights differ from everything on the GPU is reported.
    """
    from peft import PeftModel

    from gemma4_compat._lab.workspace import Workspace
    from gemma4_compat._memory import layout
    from gemma4_compat._memory.blueprint import describe
    from gemma4_compat._memory.formulas import Load

    workspace = Workspace.build(folder / "tiny")
    checkpoint = tiny_models.build_checkpoint(folder / "large-table", per_layer_vocabulary=1 << 16)
    whole = _tiny.load(checkpoint, "4bit-double", device=0)
    budget = layout.smallest_budget(describe(whole), Load(context=256))
    model = _tiny.load(checkpoint, "4bit-double", device_map="auto", max_memory={0: budget, "cpu": "8GiB"})
    placement = dict(getattr(model, "hf_device_map", {}))
    names = offloaded_4bit(model)
    differ = differing(whole, model, names)
    reference = workspace.outputs(PeftModel.from_pretrained(whole, workspace.adapter("all")))
    model = PeftModel.from_pretrained(model, workspace.adapter("all"))
    return {
        "budget": budget,
        "offloaded": sorted(name for name, device in placement.items() if device == "cpu"),
        "parity": difference(reference, workspace.outputs(model)),
        "kept": model.hf_device_map == placement,
        "offloaded_4bit_weights": len(names),
        "quantized_differently": differ,
    }


def small_budget(folder: Path) -> dict[str, Any]:
    """E2B with ``device_map="auto"`` and 2 GiB: the peak from before the load to after the answers."""
    return measured(folder, "auto", max_memory={0: "2GiB", "cpu": "60GiB"})


def quantized_layers(folder: Path) -> dict[str, Any]:
    """E2B with every other layer, the towers and the per-layer table on the CPU, layers in 4 bits."""
    away = [*TOWERS, PER_LAYER, *(f"model.language_model.layers.{index}" for index in range(0, 35, 2))]
    # Without the shim the layers are in bf16, so the answers are others.
    with opt_in.OFFLOADED.enabled():
        return measured(folder, {"": 0, **dict.fromkeys(away, "cpu")})


def tiny(folder: Path) -> dict[str, Any]:
    """A tiny checkpoint."""
    tiny_models.build_checkpoint(folder / "tiny")
    return {}


def compiled(folder: Path) -> dict[str, Any]:
    """A static cache, with which upstream compiles decoding, on the tiny model; tokens against the default cache."""
    import torch

    model = _tiny.load(folder / "tiny", device=0).float()
    options = {**_tiny.inputs(torch.device(0), text_only=True), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**options)
    started = time.perf_counter()
    found = model.generate(**options, cache_implementation="static")
    return {"same_tokens": torch.equal(expected, found), "seconds": time.perf_counter() - started}


def experts(folder: Path) -> dict[str, Any]:
    """Six layers in the shape of the 26B-A4B, with the experts in 4 bits; then with two layers on the CPU."""
    import torch
    from transformers import Gemma4ForConditionalGeneration

    checkpoint = folder / "experts" / "checkpoint"
    if not checkpoint.exists():
        config = variants.config("26B-A4B", layers=6)
        config.vision_config.num_hidden_layers = 2
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            Gemma4ForConditionalGeneration(config).save_pretrained(checkpoint, max_shard_size="4GB")
        torch.set_default_dtype(torch.float32)

    def load(placement: Any) -> Any:
        with opt_in.EXPERTS.enabled(), opt_in.OFFLOADED.enabled():
            return base(folder / "experts", placement)

    def logits(model: Any) -> Outputs:
        ids = torch.randint(3, 250_000, (1, 64), generator=torch.Generator().manual_seed(7)).to(0)
        with torch.no_grad():
            found = [model(input_ids=ids).logits.float().cpu() for _ in range(3)]
            return Outputs(tuple(found), model.generate(input_ids=ids, max_new_tokens=8, do_sample=False).cpu())

    model = load({"": 0})
    result: dict[str, Any] = {
        "gib": torch.cuda.memory_allocated() / GIB,
        "experts_gib": sum(parameter.nbytes for name, parameter in model.named_parameters() if ".experts." in name)
        / GIB,
        "routers": sorted(
            {str(p.dtype) for name, p in model.named_parameters() if name.endswith("router.proj.weight")}
        ),
    }
    reference = logits(model)
    del model
    collect()
    away = {f"model.language_model.layers.{index}": "cpu" for index in (1, 4)}
    model = load({"": 0, **away})
    result["split_gib"] = torch.cuda.memory_allocated() / GIB
    result["parity"] = difference(reference, logits(model))
    return result


def collect() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def measured(folder: Path, placement: Any, **kwargs: Any) -> dict[str, Any]:
    """Parity with everything on the GPU, and what was allocated there while loading and running."""
    import torch

    whole = base(folder, {"": 0})
    reference = outputs(whole)
    del whole
    collect()
    left = torch.cuda.memory_allocated()
    model = base(folder, placement, **kwargs)
    torch.cuda.synchronize()
    if all_on_the_host(model):
        return {"all_on_the_host": True}
    result: dict[str, Any] = {
        "left_gib": left / GIB,
        "resident_gib": torch.cuda.memory_allocated() / GIB,
        "load_peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "largest_block_gib": largest_block(model) / GIB,
        "offloaded_4bit_weights": len(offloaded_4bit(model)),
    }
    result["parity"] = difference(reference, outputs(model))
    result["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return result


def offloaded_4bit(model: Any) -> list[str]:
    """Modules with 4-bit weights that are not on the GPU between forwards."""
    return [
        name
        for name, module in model.named_modules()
        if _placement.is_offloaded(module) and type(getattr(module, "weight", None)).__name__ == "Params4bit"
    ]


def differing(whole: Any, model: Any, names: list[str]) -> int:
    """How many of these modules have other 4-bit weights, scales included, than in ``whole``."""
    import torch

    differed = 0
    for name in names:
        weight = whole.get_submodule(name).weight
        expected = weight.quant_state.as_dict(packed=True)
        with _placement.weights_brought_in(model.get_submodule(name)):
            other = model.get_submodule(name).weight
            found = other.quant_state.as_dict(packed=True)
            same = all(torch.equal(expected[key].cpu(), found[key].cpu()) for key in expected)
            differed += not (same and torch.equal(weight.data.cpu(), other.data.cpu()))
    return differed


def main(argv: list[str]) -> int:
    name, folder = argv[0], Path(argv[1])
    try:
        result = {"error": None, **globals()[name](folder)}
    except Exception as error:  # noqa: BLE001  (the user's crash is the result)
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    result["patches"] = {patch_id: str(status.state) for patch_id, status in gemma4_compat.status().items()}
    print("\n" + json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
