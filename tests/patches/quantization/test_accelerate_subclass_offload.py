"""accelerate-subclass-offload: what docs/QUANTIZATION.md says of other libraries, where they are installed."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.quantization.accelerate_subclass_offload import PATCH, settings
from tests.patches.promise import Promise
from tests.patches.quantization import qat

#: Library, where decoder layers go, and whether that gives the same outputs; otherwise it is refused.
CELLS = [
    ("torchao", "host memory", True),
    ("torchao", "disk", False),
    ("quanto", "host memory", False),
    ("quanto", "disk", False),
]


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Int8Tensor dispatch|WeightQBytesTensor.__new__\(\)"
    exact = False


def load(workspace: Any, library: str) -> Any:
    import torch
    import transformers

    found = settings()
    if library not in found:
        pytest.skip(f"{library} is not installed")
    cls = getattr(transformers, tiny_models.class_name(workspace.checkpoint))
    options = {"dtype": torch.bfloat16, "quantization_config": found[library]}
    return cls.from_pretrained(workspace.checkpoint, **options).eval()


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():  # quanto's kernel for CPUs takes no transposed inputs, which the audio tower has
        return [model(**tiny.inputs(text_only=True)).logits for _ in range(2)]


@pytest.mark.parametrize(("library", "place", "exact"), CELLS)
def test_offloaded(workspace: Any, library: str, place: str, exact: bool) -> None:
    model = load(workspace, library)
    expected = logits(model)
    places = {name: parameter.device for name, parameter in model.named_parameters()}

    def dispatched() -> Any:
        if place == "disk":
            return workspace.dispatch_map(model, qat.layout(model, "layers"))
        return qat.into_host_memory(model, "layers")

    if not exact:
        with pytest.raises(gemma4_compat.Gemma4CompatError, match=f"of {library}, which accelerate cannot offload"):
            dispatched()
        assert {name: parameter.device for name, parameter in model.named_parameters()} == places
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert all(one.equal(other) for one, other in zip(expected, logits(dispatched() if exact else model), strict=True))


@pytest.mark.parametrize("library", ["torchao", "quanto"])
def test_embeddings_are_offloaded_as_they_are(workspace: Any, library: str) -> None:
    model = load(workspace, library)
    expected = logits(model)
    model = workspace.dispatch_map(model, qat.layout(model, "embedding"))
    assert all(one.equal(other) for one, other in zip(expected, logits(model), strict=True))


@pytest.mark.parametrize("library", ["torchao", "quanto"])
def test_an_adapter_has_gradients(workspace: Any, library: str) -> None:
    model = qat.adapted(load(workspace, library))
    batch = tiny.inputs(text_only=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.requires_grad]
    assert gradients
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)


@pytest.mark.parametrize("tuner", ["dora", "pissa", "olora", "adalora", "hra"])
def test_what_does_not_run_on_quanto_is_refused(workspace: Any, tuner: str) -> None:
    """Otherwise: ``The dtype of a weights Tensor cannot be changed``, for DoRA from the first forward."""
    import peft

    targets = r".*language_model.*(q_proj|up_proj)"
    lora = {
        "dora": {"use_dora": True},
        "pissa": {"init_lora_weights": "pissa"},
        "olora": {"init_lora_weights": "olora"},
    }
    if tuner in lora:
        config: Any = peft.LoraConfig(r=4, target_modules=targets, **lora[tuner])
    elif tuner == "hra":
        config = peft.HRAConfig(r=4, target_modules=targets)
    else:
        config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=targets)
    model = load(workspace, "quanto")
    expected, before = logits(model), {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(
        gemma4_compat.Gemma4CompatError, match=r"layers of quanto such as.*Nothing was changed. Use LoRA"
    ):
        peft.get_peft_model(model, config)
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert all(one.equal(other) for one, other in zip(expected, logits(model), strict=True))


@pytest.mark.parametrize("tuner", ["rslora", "vera", "oft", "ia3", "loha"])
def test_what_runs_on_quanto_has_gradients(workspace: Any, tuner: str) -> None:
    import peft

    targets = r".*language_model.*(q_proj|up_proj)"
    config: Any = {
        "rslora": lambda: peft.LoraConfig(r=4, target_modules=targets, use_rslora=True),
        "vera": lambda: peft.VeraConfig(r=4, target_modules=targets),
        "oft": lambda: peft.OFTConfig(oft_block_size=8, target_modules=targets),
        "ia3": lambda: peft.IA3Config(target_modules=targets, feedforward_modules=[]),
        "loha": lambda: peft.LoHaConfig(r=4, alpha=8, target_modules=targets),
    }[tuner]()
    model = peft.get_peft_model(load(workspace, "quanto"), config)
    batch = tiny.inputs(text_only=True)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.requires_grad]
    assert any(gradient is not None and bool(gradient.any()) for gradient in gradients)
