"""F39 and F41: adapters are merged into offloaded layers, and taken out again, as on one device."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import gemma4_compat
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._lab import tiny_adapters
from gemma4_compat.patches.adapters.peft_merge_offloaded import PATCH
from tests.generated.search import replay_tuners
from tests.helpers import pairwise
from tests.patches.adapters import tied_halves
from tests.patches.adapters.tied_halves import EMBEDDING, HALVES, LAYERS, PLACES
from tests.patches.promise import Promise

LAYER = "model.language_model.layers.1"
TARGETS: dict[str, Any] = {
    "layers": LAYERS,
    "embedding": ["embed_tokens"],
    "head": ["lm_head"],
    "both": ["embed_tokens", "lm_head"],
}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "logits differ|a token differs"


@functools.cache
def adapter(workspace: Any, targets: str, seed: int = 1) -> Path:
    folder = workspace.folder / f"merged-{targets}-{seed}"
    return tiny_adapters.write_adapter(workspace.load(), TARGETS[targets], folder, seed=seed)


def adapted(model: Any) -> list[Any]:
    """PEFT's layers."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def steps(workspace: Any, base: Any, targets: str, *names: str) -> list[Any]:
    """Outputs after each of the steps; after the last whether it is tied, of a model that was unloaded."""
    import torch
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, adapter(workspace, targets))
    model.load_adapter(adapter(workspace, "layers", 2), "second")
    found = []
    for name in names:
        if name == "disable_adapter":
            with model.disable_adapter():
                found.append(tied_halves.logits(workspace, model))
        elif name == "load_adapter":
            model.load_adapter(adapter(workspace, "layers", 3), "third")
        elif name in ("merge_adapter", "unmerge_adapter"):
            getattr(model, name)()
        elif name == "merge second":
            model.merge_adapter(adapter_names=["second"])
        elif name in ("merge each", "unmerge each"):
            for layer in adapted(model):
                layer.merge(safe_merge=True) if name == "merge each" else layer.unmerge()
        elif name in ("merge_and_unload", "unload"):
            model = model.merge_and_unload(safe_merge=True) if name == "merge_and_unload" else model.unload()
        elif name == "add_weighted_adapter":
            model.add_weighted_adapter(["default"], [0.7], name, combination_type="cat")
            model.set_adapter(name)
        else:
            model.set_adapter(name)
        found.append(tied_halves.logits(workspace, model.eval()))
    if "unload" in names[-1]:
        found.append(torch.tensor(model.config.tie_word_embeddings))
    return found


SEQUENCES = (
    ("merge_adapter", "disable_adapter", "unmerge_adapter", "merge_adapter", "unload"),
    ("merge_adapter", "second", "default"),
    ("merge each", "disable_adapter", "merge each", "unmerge each", "merge each", "unmerge_adapter"),
    ("merge_adapter", "merge second", "disable_adapter"),
    ("merge_adapter", "load_adapter", "disable_adapter", "merge_adapter"),
    ("add_weighted_adapter", "merge_and_unload"),
)


@functools.cache
def expected(workspace: Any, targets: str, sequence: tuple[str, ...], quantization: str | None) -> list[Any]:
    return steps(workspace, workspace.load(quantization), targets, *sequence)


@pytest.mark.parametrize("sequence", SEQUENCES, ids=", ".join)
@pytest.mark.parametrize(
    ("place", "quantization"),
    [
        *((place, None) for place in PLACES),
        ("ram", "4bit-double"),
        ("disk", "4bit"),
        ("ram", "8bit"),
        ("disk", "8bit"),
    ],
)
def test_an_offloaded_layer_is_merged_and_unmerged_as_on_one_device(
    workspace: Any, place: str, quantization: str | None, sequence: tuple[str, ...]
) -> None:
    model = tied_halves.split(workspace, place, (LAYER,), quantization)
    found = steps(workspace, model, "layers", *sequence)
    assert tied_halves.same(expected(workspace, "layers", sequence, quantization), found)


@pytest.mark.parametrize(("place", "half", "targets"), pairwise(PLACES, list(HALVES), ["embedding", "head", "both"]))
def test_tied_weights_that_are_apart_are_merged_together(workspace: Any, place: str, half: str, targets: str) -> None:
    for sequence in (SEQUENCES[0], SEQUENCES[2], SEQUENCES[3], SEQUENCES[-1]):
        model = tied_halves.split(workspace, place, HALVES[half])
        if place == "ram":
            tied_halves.logits(workspace, model)  # after a forward
        found = steps(workspace, model, targets, *sequence)
        assert tied_halves.same(expected(workspace, targets, sequence, None), found), sequence


def one_layer_of(workspace: Any, base: Any, tuner: str) -> list[Any]:
    """Logits with one layer merged, twice without the adapter, with it again, and with that layer merged and back."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(base, replay_tuners.config(tuner))
    replay_tuners.drawn(model, 1)
    layer = next(layer for name, layer in model.named_modules() if layer in adapted(model) and f"{LAYER}." in name)
    layer.merge()
    found = [tied_halves.logits(workspace, model)]
    with model.disable_adapter():
        found += [tied_halves.logits(workspace, model) for _ in range(2)]
    for change in (lambda: None, lambda: layer.merge(adapter_names=["default"]), lambda: layer.unmerge()):
        change()
        found.append(tied_halves.logits(workspace, model))
    return found


@pytest.mark.parametrize("tuner", ["hra", "oft", "shira", "ia3", "hira", "osf", "loha", "dora", "boft", "adalora"])
@pytest.mark.parametrize("place", ["ram", "disk"])
def test_one_layer_is_merged_by_itself(workspace: Any, place: str, tuner: str) -> None:
    import peft

    if not hasattr(peft, replay_tuners.TUNERS[tuner][0]):
        pytest.skip(f"this PEFT has no {tuner}")
    if tuner == "osf" and Version(peft.__version__) < Version("0.21"):
        pytest.skip("a merge makes bf16 weights float32, and the next forward fails, on one device as well")
    split = one_layer_of(workspace, tied_halves.split(workspace, place, (LAYER,)), tuner)
    assert tied_halves.same(one_layer_of(workspace, workspace.load(), tuner), split)


def test_a_layer_that_was_merged_before_the_dispatch_is_unmerged(workspace: Any) -> None:
    import torch
    from accelerate import dispatch_model
    from peft import PeftModel

    def merged(*, split: bool) -> list[Any]:
        model = PeftModel.from_pretrained(workspace.load(), adapter(workspace, "layers"))
        model.merge_adapter()
        if split:
            main = torch.device("cpu")
            model = dispatch_model(model, {"": main, f"base_model.model.{LAYER}": "cpu"}, main_device=main)
        found = [tied_halves.logits(workspace, model)]
        with model.disable_adapter():
            found += [tied_halves.logits(workspace, model) for _ in range(2)]
        return [*found, tied_halves.logits(workspace, model)]

    assert tied_halves.same(merged(split=False), merged(split=True))


def test_a_merge_that_fails_changes_nothing(workspace: Any) -> None:
    import torch
    from peft import PeftModel

    model = tied_halves.split(workspace, "disk", (LAYER, EMBEDDING))
    model = PeftModel.from_pretrained(model, adapter(workspace, "embedding"))
    with model.disable_adapter():
        before = tied_halves.logits(workspace, model)
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.lora_embedding_A["default"][0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    with pytest.raises(ValueError, match="NaNs detected"):
        embedding.merge(True)
    with model.disable_adapter():
        assert torch.equal(before, tied_halves.logits(workspace, model))
    assert module_hooks.is_offloaded(embedding.base_layer)


def test_a_merged_model_is_copied_and_keeps_its_way_back_without_the_patches(workspace: Any) -> None:
    import torch
    from peft import PeftModel

    model = tied_halves.split(workspace, "ram", (LAYER,))
    model = PeftModel.from_pretrained(model, adapter(workspace, "layers"))
    model.merge_adapter()
    merged = tied_halves.logits(workspace, model)
    copied = copy.deepcopy(model)
    gemma4_compat.revert(PATCH.id)
    try:
        model.unmerge_adapter()
        unmerged = tied_halves.logits(workspace, model)
    finally:
        gemma4_compat.install()
    assert torch.equal(merged, tied_halves.logits(workspace, copied))
    copied.unmerge_adapter()
    assert torch.equal(unmerged, tied_halves.logits(workspace, copied))
    assert not torch.equal(merged, unmerged)


def test_merge_and_unload_onloads_one_layer_at_a_time(workspace: Any) -> None:
    from peft import PeftModel

    model = tied_halves.split(workspace, "disk", (LAYER, "model.language_model.layers.3"))
    model = PeftModel.from_pretrained(model, adapter(workspace, "layers"))
    onloaded = []
    for module in model.modules():
        if module_hooks.is_offloaded(module):
            pre_forward = module._hf_hook.pre_forward

            def spy(module: Any, *args: Any, original: Any = pre_forward, **kwargs: Any) -> Any:
                onloaded.append(module)
                return original(module, *args, **kwargs)

            module._hf_hook.pre_forward = spy
    model.merge_and_unload()
    assert len(onloaded) == 2, "q_proj and up_proj of the offloaded layer that has an adapter"


def dora_after_a_merge(workspace: Any, base: Any) -> list[Any]:
    """Logits of a new DoRA on a merged model, once before and once after a backward pass through the merged one."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    model = PeftModel.from_pretrained(base, adapter(workspace, "layers")).merge_and_unload()
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        config = LoraConfig(r=4, use_dora=True, init_lora_weights=False, target_modules=LAYERS)
        dora = get_peft_model(model, config)
        found += [weight.detach().clone() for name, weight in dora.named_parameters() if "magnitude" in name]
        found.append(tied_halves.logits(workspace, dora.eval()))
        model = dora.unload()
        inputs = workspace.inputs(text_only=True)
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
        model(**inputs).logits.sum().backward()
    return found


@functools.cache
def expected_dora(workspace: Any, quantization: str | None) -> list[Any]:
    return dora_after_a_merge(workspace, workspace.load(quantization))


@pytest.mark.parametrize("quantization", [None, "4bit", "4bit-double", "8bit"])
@pytest.mark.parametrize("place", ["disk", "ram"])
def test_a_merged_layer_gets_a_dora(workspace: Any, place: str, quantization: str | None) -> None:
    import torch

    names = (f"{LAYER}.mlp", f"{LAYER}.self_attn", "model.language_model.layers.0")
    split = tied_halves.split(workspace, place, names, quantization)
    found = dora_after_a_merge(workspace, split)
    for first, second in zip(expected_dora(workspace, quantization), found, strict=True):
        assert torch.equal(first, second)
