"""Without a private interface of torch, layers stay with accelerate's own offloading: exact, and one line says so."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._offload import model_lock, torch_internals
from gemma4_compat._offload.transfer import streaming

pytest.importorskip("accelerate", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")


class Gone:
    """In place of an attribute of a class."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise AttributeError("gone")


def without_graph_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delattr(torch._C, "_current_graph_task_id")


def without_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine as it would be: it runs backward passes, and takes no callbacks."""
    import torch

    engine = torch.autograd.Variable._execution_engine
    others = {"run_backward": engine.run_backward, "is_checkpoint_valid": engine.is_checkpoint_valid}
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", SimpleNamespace(**others))


def without_resizing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.UntypedStorage, "resize_", Gone(), raising=False)


def with_other_resizing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, and does something else."""
    import torch

    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda self, size: self, raising=False)


DELETED = {
    without_graph_tasks: "torch._C._current_graph_task_id",
    without_callbacks: "torch.autograd.Variable._execution_engine.queue_callback",
    without_resizing: "torch.UntypedStorage.resize_",
    with_other_resizing: "torch.UntypedStorage.resize_",
}


@pytest.fixture(autouse=True)
def said_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "_warned", set())


def answers(workspace: Any, model: Any) -> Any:
    """Logits and tokens; then the gradients of an adapter, with checkpointing, which runs layers again.

    torch's own checkpointing needs graph tasks.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    outputs = workspace.outputs(model, text_only=True)
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=r".*language_model.*(q_proj|up_proj)", init_lora_weights=False)
    tuned = get_peft_model(model, config).train()
    if hasattr(torch._C, "_current_graph_task_id"):
        tuned.gradient_checkpointing_enable({"use_reentrant": False})
    tuned.enable_input_require_grads()
    batch = workspace.inputs(text_only=True)
    tuned(**batch, labels=batch["input_ids"]).loss.backward()
    gradients = {name: value.grad.cpu() for name, value in tuned.named_parameters() if value.requires_grad}
    assert gradients
    return [*outputs.logits, outputs.tokens, *gradients.values()]


@pytest.fixture(scope="module")
def on_one_device(workspace: Any) -> Callable[[str | None], Any]:
    known: dict[str | None, Any] = {}

    def find(quantization: str | None) -> Any:
        if quantization not in known:
            known[quantization] = answers(workspace, workspace.load(quantization))
        return known[quantization]

    return find


@pytest.mark.parametrize("quantization", [None, "4bit-double"], ids=["bf16", "4bit"])
@pytest.mark.parametrize("delete", DELETED, ids=lambda delete: delete.__name__)
def test_the_outputs_stay_exact_and_one_line_says_so(
    workspace: Any, on_one_device: Any, monkeypatch: pytest.MonkeyPatch, delete: Any, quantization: str | None
) -> None:
    import torch

    expected = on_one_device(quantization)
    model = workspace.load(quantization)
    delete(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = workspace.dispatch(model)
        workspace.dispatch(workspace.load(quantization))
    lines = [str(one.message) for one in caught if issubclass(one.category, Gemma4CompatWarning)]
    assert len(lines) == 1, lines
    assert DELETED[delete] in lines[0]
    assert "accelerate's own offloading" in lines[0]
    assert not streaming.streamers(model)
    assert model_lock.of(model) is None
    found = answers(workspace, model)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


def test_with_all_of_them_layers_are_streamed(workspace: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Gemma4CompatWarning)
        model = workspace.split()
    assert torch_internals.missing() == ()
    assert streaming.streamers(model)


def test_a_model_on_one_device_hears_nothing(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without_graph_tasks(monkeypatch)
    model = workspace.load()
    with warnings.catch_warnings():
        warnings.simplefilter("error", Gemma4CompatWarning)
        workspace.dispatch_map(model, {"": workspace.main})


def test_a_split_model_cannot_be_pickled_with_the_error_of_accelerates_hooks(workspace: Any) -> None:
    model = workspace.split()
    assert streaming.streamers(model)
    with pytest.raises(Exception) as upstream:
        pickle.dumps(model.lm_head.forward)
    with pytest.raises(type(upstream.value), match="local object"):
        pickle.dumps(model)
