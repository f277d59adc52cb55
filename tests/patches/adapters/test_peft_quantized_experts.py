"""peft-quantized-experts: LoRA with target_parameters on experts in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.quantization import expert_forward, expert_storage, experts
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.peft_quantized_experts import PATCH
from tests.patches.promise import Promise

LAYERS = "model.language_model.layers"
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"lora_A takes one value"


@pytest.fixture(scope="module")
def load(workspace: Any) -> Callable[..., Any]:
    """``load(plain=False)``: a 4-bit model with experts in 4 bits; ``plain``: in bf16, with the values of those."""
    checkpoint = workspace.cached(tiny_models.build_moe_checkpoint)

    def load(*, plain: bool = False, **options: Any) -> Any:
        with gemma4_compat.quantize(experts=True):
            model = tiny.load(checkpoint, "4bit-double", device=workspace.main, **options)
        if plain:
            for module in experts.all_experts(model).values():
                expert_storage.dequantize_module(module)
        return model

    return load


def adapted(model: Any, targets: Any = TARGETS, **options: Any) -> Any:
    """``model`` with an adapter that is not zero and whose numbers depend on nothing else."""
    import peft
    import torch

    config = peft.LoraConfig(r=2, target_modules=options.pop("target_modules", []), target_parameters=targets)
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def outputs(workspace: Any, model: Any) -> Any:
    return workspace.outputs(model, text_only=True)


def gradients(workspace: Any, model: Any) -> dict[str, Any]:
    import torch

    model.train()
    batch = tiny.inputs(workspace.main, text_only=True)
    model(**batch).logits.float().square().mean().backward()
    model.eval()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in found.values())
    return found


@pytest.mark.parametrize("targets", [TARGETS, TARGETS[1:]], ids=["both", "down"])
def test_answers_and_gradients_are_those_over_the_dequantized_experts(
    workspace: Any, load: Callable[..., Any], targets: list[str]
) -> None:
    import torch

    model, reference = adapted(load(), targets), adapted(load(plain=True), targets)
    assert {name: parameter.shape for name, parameter in model.named_parameters() if "lora" in name} == {
        name: parameter.shape for name, parameter in reference.named_parameters() if "lora" in name
    }
    expected = outputs(workspace, reference)
    assert difference(expected, outputs(workspace, model)) == 0.0
    with model.disable_adapter():
        assert difference(outputs(workspace, load()), outputs(workspace, model)) == 0.0
    assert difference(outputs(workspace, load()), expected) > 0.0
    found, wanted = gradients(workspace, model), gradients(workspace, reference)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_together_with_linear_layers_and_checkpointing(workspace: Any, load: Callable[..., Any]) -> None:
    import torch

    def model() -> Any:
        return adapted(load(), target_modules=r".*language_model.*\.(q_proj|up_proj)")

    plain, checkpointed = model(), model()
    checkpointed.enable_input_require_grads()
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found, wanted = gradients(workspace, checkpointed), gradients(workspace, plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_training_step_saved_and_loaded(workspace: Any, load: Callable[..., Any], tmp_path: Path) -> None:
    import peft
    import torch

    results = []
    for plain in (True, False):
        model = adapted(load(plain=plain))
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
        before = outputs(workspace, model)
        gradients(workspace, model)
        optimizer.step()
        after = outputs(workspace, model)
        assert difference(before, after) > 0.0
        results.append(after)
    assert difference(*results) == 0.0
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(), tmp_path).eval()
    assert difference(results[1], outputs(workspace, again)) == 0.0
    assert difference(outputs(workspace, load()), outputs(workspace, again.unload())) == 0.0


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "unpaged"])
def test_offloaded_experts(workspace: Any, load: Callable[..., Any], tmp_path: Path, paged: bool) -> None:
    import peft
    import torch

    whole = adapted(load())
    whole.save_pretrained(tmp_path)
    expected, wanted = outputs(workspace, whole), gradients(workspace, whole)
    if not paged:
        gemma4_compat.revert("accelerate-paged-layers")
    try:
        base = load()
        placement = dict.fromkeys(tiny.device_map(base, "none", main=workspace.main, offloaded="disk"), workspace.main)
        base = workspace.dispatch_map(base, placement | {f"{LAYERS}.1": workspace.offloaded})
        model = peft.PeftModel.from_pretrained(base, tmp_path, is_trainable=True).eval()
        assert base.get_submodule(f"{LAYERS}.0").self_attn.q_proj.weight.device.type != "meta"
        assert not [
            name for name, weight in model.named_parameters() if "lora" in name and weight.device.type == "meta"
        ]
        assert difference(expected, outputs(workspace, model)) == 0.0
        found = gradients(workspace, model)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    finally:
        gemma4_compat.install()


@pytest.mark.skipif(
    versions.admits("<0.20", versions.installed("peft") or "0"),
    reason="before PEFT 0.20 one adapter alone can have target_parameters",
)
def test_two_adapters(workspace: Any, load: Callable[..., Any]) -> None:
    import peft
    import torch

    found = []
    for plain in (True, False):
        model = adapted(load(plain=plain))
        torch.manual_seed(5)
        config = peft.LoraConfig(r=4, target_modules=[], target_parameters=TARGETS, init_lora_weights=False)
        model.add_adapter("second", config)
        one = outputs(workspace, model)
        model.set_adapter("second")
        two = outputs(workspace, model)
        assert difference(one, two) > 0.0
        model.base_model.set_adapter(["default", "second"])
        found.append((one, two, outputs(workspace, model)))
    assert [difference(a, b) for a, b in zip(*found)] == [0.0] * 3


def test_a_merge_is_refused_before_anything_is_changed(workspace: Any, load: Callable[..., Any]) -> None:
    model = adapted(load(), target_modules=["q_proj"])
    before = outputs(workspace, model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(Gemma4CompatError, match=r"experts in 4 bits\. Nothing was changed\. .* dequantize\(\)"):
            merge()
        assert difference(before, outputs(workspace, model)) == 0.0
    wrapper = next(part for part in model.modules() if hasattr(part, "parameter_name"))
    with pytest.raises(Gemma4CompatError, match="cannot be merged"):
        wrapper.merge()


def test_dequantized_it_can_be_merged(load: Callable[..., Any]) -> None:
    import torch

    model = adapted(load())
    with torch.no_grad():
        wanted = {
            f"{LAYERS}.{index}.experts.{wrapper.parameter_name}": values_of(wrapper)
            for index in range(3)
            for wrapper in wrappers(model, index)
        }
    assert len(wanted) == 6
    model.base_model.model.dequantize()
    merged = model.merge_and_unload()
    assert all(torch.equal(merged.get_parameter(name), values) for name, values in wanted.items())


def wrappers(model: Any, index: int) -> list[Any]:
    return [
        part
        for name, part in model.named_modules()
        if getattr(part, "parameter_name", None) and f"layers.{index}." in name
    ]


def values_of(wrapper: Any) -> Any:
    """As PEFT merges them."""
    values = expert_storage.dequantized(wrapper.get_base_layer()._parameters[wrapper.parameter_name])
    values += wrapper.get_delta_weight("default")
    return values


def test_other_parameters_are_left_to_peft(workspace: Any, load: Callable[..., Any]) -> None:
    found = []
    for off in (False, True):
        if off:
            gemma4_compat.revert(PATCH.id)
        try:
            model = adapted(load(plain=True))
            found.append(outputs(workspace, model))
        finally:
            gemma4_compat.install()
    assert difference(*found) == 0.0


def test_forwards_that_overlap_remove_their_own() -> None:
    module, functions = SimpleNamespace(), [lambda x: x + 1, lambda x: x + 2]
    first, second = (expert_forward.adding(module, "down_proj", add) for add in functions)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert expert_forward.added_to(module) == {"down_proj": (functions[1],)}
    second.__exit__(None, None, None)
    assert vars(module) == {}
