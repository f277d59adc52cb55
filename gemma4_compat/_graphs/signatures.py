"""What calls share that one graph serves: shapes, options, settings of torch; and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.state.snapshots import changed
from gemma4_compat._graphs.statistics import Cause

#: What the end of a signature says, in this order.
_SETTINGS = (
    "inference mode",
    "deterministic algorithms",
    "default dtype",
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "flash_sdp",
    "mem_efficient_sdp",
    "math_sdp",
    "cudnn_sdp",
)


def of(modes: tuple[Any, ...], inputs: dict[str, Any], found: list[Any]) -> tuple[Any, ...]:
    """The signature of a step.

    Args:
        modes: what the updates of its cache depend on, which is not in a tensor.
        inputs: by name.
        found: the tensors in them.
    """
    shapes = tuple([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in found])
    return modes, shapes, tuple(_names(inputs)), *settings()


def differences(
    signature: tuple[Any, ...], before: tuple[Any, ...], inputs: dict[str, Any], lengths: tuple[int, int]
) -> Iterator[tuple[Cause, str]]:
    """Why the graph of a step does not serve another: cause and detail.

    Args:
        signature: of the other.
        before: of the step that was captured.
        inputs: of the other.
        lengths: of the caches of both, in positions, the older one first.
    """
    (full, shapes, names, *now), (was_full, old_shapes, old_names, *then) = signature, before
    for name in dict.fromkeys((*_flat(old_names), *_flat(names))):
        if (name in _flat(old_names)) != (name in _flat(names)):
            yield Cause.OPTION, name
    found = [(name, *pair) for name, *pair in zip(_paths(inputs), old_shapes, shapes) if pair[0] != pair[1]]
    if lengths[0] != lengths[1] and "input_ids" not in [name for name, *_ in found]:
        yield Cause.CACHE_LENGTH, f"{changed(*lengths)} positions"
    for name, old, new in found:
        yield Cause.SHAPE, f"{name}: {changed(_shown(old), _shown(new))}"
    for name, old, new in zip(_SETTINGS, then, now):
        if old != new:
            yield Cause.SETTING, f"{name}: {changed(old, new)}"
    if full != was_full:
        yield Cause.WINDOW, f"{changed(sum(was_full), sum(full))} of {len(full)} layers"


def settings() -> tuple[Any, ...]:
    """What kernels depend on in torch: the values of :data:`_SETTINGS`."""
    import torch

    return (
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def tensors(value: Any) -> list[Any]:
    """The tensors in nested dictionaries, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors(part)]
    return []


def _names(inputs: dict[str, Any]) -> Iterator[Any]:
    """Names, and the values that are not tensors."""
    import torch

    for name, value in inputs.items():
        if isinstance(value, dict):
            yield name, tuple(_names(value)), "in it"
        elif isinstance(value, torch.Tensor) or name in cache_names.NAMES:
            yield name
        else:
            yield name, value if value.__hash__ is not None else id(value)


def _flat(names: tuple[Any, ...]) -> list[str]:
    """The names of a signature as text: ``attention_mask.sliding_attention``, ``output_hidden_states=True``."""
    found: list[str] = []
    for name in names:
        if isinstance(name, str):
            found.append(name)
        elif len(name) == 2:
            found.append(f"{name[0]}={name[1]!s:.60}")
        else:
            found += [f"{name[0]}.{part}" for part in _flat(name[1])]
    return found


def _paths(inputs: dict[str, Any], above: str = "") -> Iterator[str]:
    """The names of :func:`tensors`."""
    import torch

    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            yield f"{above}{name}"
        elif isinstance(value, dict):
            yield from _paths(value, f"{above}{name}.")


def _shown(tensor: tuple[Any, ...]) -> str:
    """A tensor, as a signature has it: shape, dtype, strides."""
    shape, dtype, _strides = tensor
    return f"{dtype} {list(shape)}"
