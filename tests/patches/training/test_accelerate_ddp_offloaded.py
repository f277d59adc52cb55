"""F34: DistributedDataParallel of a split model: gradients of one device, and all that is trained is exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat.patches.training.accelerate_ddp_offloaded import PATCH
from tests.patches.promise import Promise

IGNORED = "_ddp_params_and_buffers_to_ignore"
REFUSED = "input module must be on the same type of devices"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = rf"ValueError: DistributedDataParallel's {REFUSED}"


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def adapted(workspace: Any, base: Any, targets: str = "language") -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base, workspace.adapter(targets), is_trainable=True).train()


def ranks(module: Any, **options: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(module, **options)


def steps(workspace: Any, called: Any, *, text_only: bool = False) -> dict[str, Any]:
    """Losses of two steps, and their gradients by the weight's name."""
    batch = workspace.inputs(text_only=text_only)
    found = {}
    for step in range(2):
        loss = called(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
    inner = getattr(called, "module", called)
    return found | {name: value.grad for name, value in inner.named_parameters() if value.grad is not None}


def same(right: dict[str, Any], found: dict[str, Any]) -> bool:
    import torch

    return right.keys() == found.keys() and all(torch.equal(right[name], found[name]) for name in right)


@pytest.mark.parametrize(
    "quantization, offload, targets, options",
    [
        (None, "both", "language", {}),
        (None, "both", "all", {"find_unused_parameters": True}),
        ("4bit", "both", "all", {}),
        ("8bit", "both", "language", {"find_unused_parameters": True}),
        (None, "layers", "language", {"static_graph": True}),
        (None, "towers", "language", {"gradient_as_bucket_view": True}),
    ],
)
def test_gradients_are_those_of_one_device(
    workspace: Any, quantization: str | None, offload: str, targets: str, options: dict[str, Any]
) -> None:
    right = steps(workspace, adapted(workspace, workspace.load(quantization), targets))
    model = adapted(workspace, workspace.split(quantization, offload), targets)
    assert any(weight.is_meta for weight in model.parameters())
    found = steps(workspace, ranks(model, **options))
    assert len(found) > 2
    assert same(right, found)
    assert IGNORED not in vars(model)


def test_towers_that_are_not_fed(workspace: Any) -> None:
    right = steps(workspace, adapted(workspace, workspace.load(), "all"), text_only=True)
    model = ranks(adapted(workspace, workspace.split(), "all"), find_unused_parameters=True)
    assert same(right, steps(workspace, model, text_only=True))


def test_what_the_user_ignores_stays_so(workspace: Any) -> None:
    model = adapted(workspace, workspace.split())
    theirs = [name for name, weight in model.named_parameters() if weight.requires_grad][:2]
    setattr(model, IGNORED, theirs)
    wrapped = ranks(model)
    assert set(theirs) < wrapped.parameters_to_ignore
    assert getattr(model, IGNORED) is theirs
    by_name = dict(model.named_parameters())
    others = wrapped.parameters_to_ignore - set(theirs)
    assert not any(by_name[name].requires_grad for name in others & by_name.keys())


def test_a_module_of_ones_own_around_the_model(workspace: Any) -> None:
    import torch

    class Around(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.inner = model

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    right = steps(workspace, Around(adapted(workspace, workspace.load())))
    assert same(right, steps(workspace, ranks(Around(adapted(workspace, workspace.split())))))


def test_an_offloaded_weight_to_be_trained_is_named(workspace: Any) -> None:
    model = adapted(workspace, workspace.split())
    name = "base_model.model.model.language_model.layers.2.post_attention_layernorm.weight"
    model.get_parameter(name).requires_grad_(True)
    for kind in (Gemma4CompatError, ValueError):  # torch's is the second
        with pytest.raises(kind, match=rf"1 weights are to be trained and are offloaded, '{name}'.*Freeze them"):
            ranks(model)
    assert IGNORED not in vars(model)


def test_weights_on_meta_that_nothing_brings_in_are_refused_as_before() -> None:
    import torch

    with pytest.raises(ValueError, match=REFUSED):
        ranks(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta").requires_grad_(False)))


def test_undone_it_is_torchs_again(workspace: Any) -> None:
    model = adapted(workspace, workspace.split())
    gemma4_compat.revert(PATCH.id)
    try:
        with pytest.raises(ValueError, match=REFUSED):
            ranks(model)
    finally:
        gemma4_compat.install()
