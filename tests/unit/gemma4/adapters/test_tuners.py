"""What each tuner of PEFT, and each other thing its configs can train, does on Gemma 4, on plain and on 4-bit bases.

docs/ADAPTERS.md shows the table of tools/pages/tuners.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.adapters.clipped import is_wrapper
from gemma4_compat._gemma4.quantization.plain_layers import is_quantized
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from tools.pages import tuners
from tools.pages.tuners import NEVER, TUNERS, Tuner

pytestmark = pytest.mark.full

CLASSES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")
#: Half the distance between neighbours in bf16, of the larger one.
HALF_STEP = 2.0**-9


def since(release: str) -> bool:
    import peft

    return release != NEVER and versions.admits(f">={release}", peft.__version__)


def inputs(model: Any, text_only: bool) -> dict[str, Any]:
    """As a processor gives them after ``.to(model.device, model.dtype)``."""
    batch = tiny.inputs(next(model.parameters()).device, text_only=text_only)
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in batch.items()}


def logits(model: Any, *, text_only: bool = False) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(**inputs(model, text_only)).logits.float().cpu()


def trained(model: Any, *, rate: float = 0.1, text_only: bool = False) -> Any:
    """``model`` after two steps of training; nearly all weights that had a gradient have moved."""
    import torch

    weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
    before = {name: value.detach().clone() for name, value in weights.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=rate)
    used = set()
    model.train()
    batch = inputs(model, text_only)
    for _ in range(2):  # some weights have no gradient while another one is zero
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        used |= {name for name, value in weights.items() if value.grad is not None and value.grad.any()}
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    moved = {name for name, value in weights.items() if not torch.equal(value, before[name])}
    assert len(moved) > 0.9 * len(used) > 0
    kinds = {kind(name) for name in weights}
    assert {kind(name) for name in moved} == kinds
    return model.eval()


def kind(name: str) -> tuple[str, str]:
    """Which part of the model and which sort of weight this is."""
    parts = name.split(".")
    part = next((part for part in parts if part.endswith("_tower")), "language")
    sort = next((part for part in parts if part in ("modules_to_save", "token_adapter")), "adapter")
    return part, sort


@pytest.mark.filterwarnings("ignore:init_lora_weights='olora' took a part out of")
@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize("tuner", TUNERS, ids=lambda tuner: tuner.name)
def test_a_tuner_learns_saves_and_merges_or_says_why_not(
    workspace: Any, tmp_path: Path, tuner: Tuner, quantization: str | None
) -> None:
    import peft
    import torch

    base = workspace.load(quantization)
    if quantization is not None and not since(tuner.runs):
        plain = logits(base)
        with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"do not work on quantized layers .*Use LoRA"):
            peft.get_peft_model(base, tuner.config())
        assert torch.equal(plain, logits(base))
        return
    torch.manual_seed(0)
    model = trained(peft.get_peft_model(base, tuner.config()), rate=tuner.rate)
    layers = [name for name, module in model.named_modules() if hasattr(module, "get_base_layer")]
    assert {kind(name)[0] for name in layers} == {"language", "vision_tower", "audio_tower"}
    assert not any(is_wrapper(model.get_submodule(name)) for name in layers)
    outputs = logits(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(workspace.load(quantization), tmp_path)
    assert torch.equal(outputs, logits(again))
    if quantization is None:
        names = [name.removeprefix("base_model.model.") for name in layers]
        assert_the_sum_is_merged(workspace, model.merge_and_unload(), tmp_path, names)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gemma4_compat.Gemma4CompatWarning)
        if since(tuner.merges):
            model.merge_and_unload()
        else:
            with pytest.raises((gemma4_compat.Gemma4CompatError, ValueError), match=r"[Cc]annot merge"):
                model.merge_and_unload()
            assert torch.equal(outputs, logits(model))


def assert_the_sum_is_merged(workspace: Any, merged: Any, adapter: Path, layers: list[str]) -> None:
    """In float32 the merged model answers as the loaded adapter does; in bf16 each weight is that one, rounded."""
    import peft

    plain = workspace.load().float()
    weights = {name: plain.get_submodule(name).weight.detach().clone() for name in layers}
    without = logits(plain)
    exact = peft.PeftModel.from_pretrained(plain, adapter)
    loaded = logits(exact)
    exact = exact.merge_and_unload()
    assert (loaded - without).abs().max() > 0.5  # measured: 1 to 4
    assert (loaded - logits(exact)).abs().max() < 1e-3  # measured: at most 7e-5
    lost = change = 0.0
    for name in layers:
        found, wanted = merged.get_submodule(name).weight.float(), exact.get_submodule(name).weight.detach()
        # Some sum in bf16, or round what is left of the base before: up to three roundings.
        assert (found - wanted).abs().max() <= 3 * HALF_STEP * wanted.abs().max(), name
        lost += float((found - wanted).square().sum())
        change += float((wanted - weights[name]).square().sum())
    print("LOST", layers[0], (loaded - without).abs().max(), (lost / change) ** 0.5)
    assert (lost / change) ** 0.5 < 0.75  # measured: 0.01 to 0.56; without the adapter it would be 1


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None, str], Any]:
    """``experts(quantization, cls)``: a tiny Gemma 4 whose decoder layers have 32 experts each."""
    import torch
    from transformers import Gemma4ForConditionalGeneration

    folder = tmp_path_factory.mktemp("experts")
    config = tiny_configs.config()
    config.text_config.update(
        {"enable_moe_block": True, "num_experts": 32, "top_k_experts": 2, "moe_intermediate_size": 32}
    )
    torch.manual_seed(0)
    tiny_models.randomized(Gemma4ForConditionalGeneration(config)).save_pretrained(folder / CLASSES[0])
    tiny_models.build_text_copy(folder / CLASSES[0], folder / CLASSES[1])
    return lambda quantization, cls: tiny.load(folder / cls, quantization, cls=cls)


@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["lm_head", "embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_vision"]},
        {"trainable_token_indices": {"embed_tokens": [3, 5]}},
        {"target_modules": "all-linear"},
    ],
    ids=str,
)
def test_what_else_is_trained_is_saved_and_loaded(
    workspace: Any, tmp_path: Path, options: dict[str, Any], quantization: str | None
) -> None:
    import peft
    import torch

    if options.get("modules_to_save") == ["embed_vision"] and not since("0.20"):
        pytest.skip("before PEFT 0.20 a trained copy takes no input by name, as embed_vision is given its own")
    options = {"target_modules": ["q_proj"], **options}
    if "trainable_token_indices" in options:
        options["trainable_token_indices"] = {"embed_tokens": tiny.inputs()["input_ids"][0, -3:].tolist()}
    base, config = workspace.load(quantization), peft.LoraConfig(r=4, **options)
    if quantization and options.get("modules_to_save") == ["embed_vision"] and quantized(base.model.embed_vision):
        before = logits(base)
        with pytest.raises(
            gemma4_compat.Gemma4CompatError, match=r"trained copy of 'model\.embed_vision'.*skip_modules"
        ):
            peft.get_peft_model(base, config)
        assert torch.equal(before, logits(base))
        return
    model = trained(peft.get_peft_model(base, config))
    outputs = logits(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(workspace.load(quantization), tmp_path)
    assert torch.equal(outputs, logits(again))
    assert not torch.equal(outputs, logits(workspace.load(quantization)))


def quantized(module: Any) -> bool:
    return any(is_quantized(part) for part in module.modules())


def test_a_copy_of_a_quantized_module_is_kept_unquantized_or_refused_where_it_is_loaded(
    workspace: Any, tmp_path: Path
) -> None:
    import peft
    import torch

    if not since("0.20"):
        pytest.skip("before PEFT 0.20 a trained copy takes no input by name, as embed_vision is given its own")

    def load() -> Any:
        return tiny.load(workspace.checkpoint, "4bit", device=workspace.main, skip_modules=["model.embed_vision"])

    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_vision"])
    model = trained(peft.get_peft_model(load(), config))
    outputs = logits(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs, logits(peft.PeftModel.from_pretrained(load(), tmp_path)))
    base = workspace.load("4bit")
    if not quantized(base.model.embed_vision):
        pytest.skip("this release quantizes no embed_vision")
    before = logits(base)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"trained copy of 'model\.embed_vision'"):
        peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(before, logits(base))


@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize(
    ("cls", "parameters"),
    [
        (CLASSES[0], ["experts.gate_up_proj", "experts.down_proj"]),
        (CLASSES[1], ["experts.down_proj"]),
        (CLASSES[1], ["model.layers.1.experts.down_proj", "model.layers.1.experts.gate_up_proj"]),
    ],
    ids=["both", "down", "both of one layer"],
)
def test_experts_are_trained_saved_and_loaded_on_either_class(
    experts: Callable[[str | None, str], Any],
    tmp_path: Path,
    cls: str,
    parameters: list[str],
    quantization: str | None,
) -> None:
    import peft
    import torch

    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=parameters)
    model = trained(peft.get_peft_model(experts(quantization, cls), config), text_only=True)
    outputs = logits(model, text_only=True)
    assert not torch.equal(outputs, logits(experts(quantization, cls), text_only=True))
    model.save_pretrained(tmp_path)
    for other in CLASSES:
        with warnings.catch_warnings():
            warnings.simplefilter("error", gemma4_compat.Gemma4CompatWarning)
            warnings.filterwarnings("error", message="Found missing adapter keys")
            again = peft.PeftModel.from_pretrained(experts(quantization, other), tmp_path)
        assert torch.equal(outputs, logits(again, text_only=True))


def test_the_table_of_the_page_is_this_table() -> None:
    text = tuners.PAGE.read_text(encoding="utf-8")
    assert tuners.page(text) == text, "python -m tools.pages.tuners"
