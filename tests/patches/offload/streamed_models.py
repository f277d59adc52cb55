"""Models with streamed layers, and what the tests of ``accelerate-paged-layers`` compare of them."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import pytest

from gemma4_compat._gemma4.accelerate import module_hooks as _placement
from gemma4_compat._lab import tiny
from gemma4_compat._offload.transfer import group_weights, module_groups, streaming

QUANTIZATIONS = [None, "4bit", "4bit-double", "8bit"]
#: Of the eight combinations with where the weights are kept, what the slower tests take: each of both, and trainings
#: those that the others leave out.
INFERENCE = pytest.mark.parametrize(
    ("quantization", "store"), [(None, "memory"), ("4bit", "disk"), ("4bit-double", "memory"), ("8bit", "disk")]
)
TRAINING = pytest.mark.parametrize(
    ("quantization", "store"), [(None, "disk"), ("4bit", "memory"), ("4bit-double", "disk"), ("8bit", "memory")]
)
LAYER = "model.language_model.layers.0"  # offloaded by every split of layers
LAST = "model.language_model.layers.5"  # so is this one, which shares its keys and values


def split(workspace: Any, quantization: str | None = None, offload: str = "both", store: str = "disk") -> Any:
    """Like ``workspace.split``; ``offload`` may be ``"all layers"``, and ``store`` says where the weights are kept.

    In host memory they are on a GPU host anyway; elsewhere accelerate keeps there what it is given beside the disk.
    """
    from accelerate import dispatch_model

    model = workspace.load(quantization)
    chosen = "both" if offload == "all layers" else offload
    placement = tiny.device_map(model, chosen, main=workspace.main, offloaded=workspace.offloaded)
    if offload == "all layers":
        placement |= {name: workspace.offloaded for name in placement if ".layers." in name}
    if store == "disk" or workspace.offloaded == "cpu":
        return workspace.dispatch_map(model, placement)
    offloaded = tuple(f"{name}." for name, device in placement.items() if device == workspace.offloaded)
    state = {name: value.clone() for name, value in model.state_dict().items() if name.startswith(offloaded)}
    skip = tiny.skip_keys(model)
    folder = tempfile.mkdtemp(prefix="offload-", dir=workspace.folder)
    model = dispatch_model(model, placement, state_dict=state, offload_dir=folder, skip_keys=skip)
    weight = next(name for name, parameter in model.named_parameters() if parameter.device.type == "meta")
    module, _, key = weight.rpartition(".")
    assert _placement.offload_hook(model.get_submodule(module)).weights_map[key].data_ptr()
    return model


def groups(streamer: streaming.LayerStreamer) -> list[module_groups.ModuleGroup]:
    return [group for group in streamer._groups if group is not None]


def weights(streamers: list[streaming.LayerStreamer]) -> list[group_weights.OffloadedWeight]:
    return [weight for streamer in streamers for group in groups(streamer) for weight in group._weights]


def bytes_on_device(streamer: streaming.LayerStreamer) -> int:
    """What the groups of a list take there now."""
    return sum(group._buffer.untyped_storage().nbytes() for group in groups(streamer) if group._buffer is not None)


def adapted(workspace: Any, base: Any, adapter: str = "all") -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(base, workspace.adapter(adapter), is_trainable=True).train()


def trained(
    workspace: Any, model: Any, *, steps: int = 1, accumulate: int = 1, backwards: int = 1, **batch: Any
) -> tuple[list[float], dict[str, Any]]:
    """The losses of some steps with AdamW, and the gradients of the last one."""
    import torch

    batch = batch or tiny.inputs(workspace.main)
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    weights = {name: weight for name, weight in weights.items() if weight.device.type != "meta"}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = model(**batch, labels=batch["input_ids"]).loss
            for left in range(backwards - 1, -1, -1):
                loss.backward(retain_graph=left > 0)
            losses.append(loss.item())
        optimizer.step()
    return losses, {name: weight.grad.cpu() for name, weight in weights.items() if weight.grad is not None}


def assert_equal(found: tuple[list[float], dict[str, Any]], expected: tuple[list[float], dict[str, Any]]) -> None:
    import torch

    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert [name for name, value in expected[1].items() if not torch.equal(value, found[1][name])] == []
    assert any(gradient.any() for gradient in expected[1].values()), "no gradients: the test shows nothing"


def assert_as_accelerate_left_it(model: Any) -> None:
    """Between forwards: weights of offloaded modules on meta, each hook's forward in its place."""
    for name, module in model.named_modules():
        if "_hf_hook" in vars(module):
            assert vars(module)["forward"] is not vars(module)["_old_forward"], name
        if _placement.offload_hook(module) is not None:
            assert {weight.device.type for weight in module.parameters(recurse=False)} <= {"meta"}, name


def checkpoint(model: Any, reentrant: bool | None) -> None:
    import torch

    if reentrant is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():  # the other kind past transformers-reentrant-checkpointing
            if reentrant and getattr(module, "gradient_checkpointing", False):
                module._gradient_checkpointing_func = functools.partial(
                    torch.utils.checkpoint.checkpoint, use_reentrant=True
                )
