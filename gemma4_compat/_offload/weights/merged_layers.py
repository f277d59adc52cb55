"""Adapters merged into offloaded base weights, and unmerged again.

A layer's ``merge`` and ``unmerge`` change the weight of its base layer, which may be offloaded. On a split model two
tied weights may be in different places: one parameter has become two. The result of a merge is stored, and every
weight tied to it gets the same value.

Replacements for the patch peft-merge-offloaded.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.weights import joined_weights, stored_weights, tied_pairs

_UNMERGE = "unmerge"  # on a merged layer: calls the layer's own with its base weight onloaded
_HANDLE = attached.UNMERGES

#: Pairs of tied weights that a running merge takes apart.
_parted: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("parted", default=[])  # noqa: B039  # never changed
#: Pairs of tied weights of the model whose adapters are being merged; None when adapters are unloaded without a merge.
_merging: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("merging")
#: The layer that is being merged or unmerged.
_onloaded: contextvars.ContextVar[Any] = contextvars.ContextVar("onloaded", default=None)


@contextlib.contextmanager
def parting(model: Any) -> Iterator[list[Any]]:
    """Inside, a merge into one of two tied weights changes only that one; yields the pairs that it takes apart.

    Raises:
        Gemma4CompatError: a pair also has trained tokens, with which PEFT overwrites what it merged.
    """
    layers = [module for module in walk.modules(model) if "merged_adapters" in vars(module)]
    tokens = [module for module in layers if type(module).__name__ == "TrainableTokensLayer"]
    around, trained = ({walk.innermost(module) for module in found} for found in (set(layers) - set(tokens), tokens))
    pairs = [pair for pair in tied_pairs.pairs(model) if {pair[0][0], pair[1][0]} & around]
    pairs = [pair for pair in pairs if stored_weights.is_same(*pair)]
    if any({pair[0][0], pair[1][0]} & trained for pair in pairs):
        raise Gemma4CompatError(
            "the head and the embedding tied to it have both a LoRA (target_modules) and trained tokens "
            "(trainable_token_indices): PEFT writes one over the other when it merges. Nothing was changed. Keep the "
            "adapter loaded, or train it with one of the two"
        )
    _forget_addresses(model, [place for pair in pairs for place in pair])
    for target, source in pairs:
        _take_apart(target, source)
    try:
        with in_place.bound(_parted, pairs):
            yield pairs
    except BaseException:
        join(model)
        raise


def _forget_addresses(model: Any, places: list[Any]) -> None:
    """Remove these weights from accelerate's map of tied ones, which identifies offloaded weights by address."""
    hooks = [hook for module in walk.modules(model) if (hook := module_hooks.offload_hook(module)) is not None]
    tensors = [place[0]._parameters[place[1]] for place in places] + [_held(place) for place in places]
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "meta":
            for hook in hooks:
                stored_weights.forget_address(hook, tensor)


def _held(place: Any) -> Any:
    """The tensor with a weight's values; None for one on disk."""
    module, name = place
    hook = module_hooks.offload_hook(module)
    if hook is None:
        return module._parameters[name]
    stored = host_memory.stored(hook.weights_map, name)
    return None if stored.on_disk else stored.raw


def _take_apart(target: Any, source: Any) -> None:
    """Make two tied weights, wherever they are, share neither a parameter nor memory."""
    import torch

    for module, _ in (target, source):
        module_hooks.offload_tied(module)
    held = [_held(place) for place in (target, source)]
    if any(value is None for value in held) or held[0].data_ptr() != held[1].data_ptr():
        return
    module, name = next((place for place in (target, source) if module_hooks.offload_hook(place[0])), target)
    if module_hooks.offload_hook(module) is not None:
        stored_weights.write(module, name, stored_weights.read(module, name).clone(), in_place=False)
    else:
        weight = module._parameters[name]
        if weight.is_floating_point():
            copied = torch.nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        else:  # quantized: its scales are beside it
            copied = copy.deepcopy(weight)
            if hasattr(module, "state"):
                module.state = copy.copy(module.state)
        module._parameters[name] = copied


def join(model: Any) -> None:
    """Turn tied weights on a device that a merge took apart back into one parameter if they have the same value."""
    for target, source in tied_pairs.pairs(model):
        if not tied_pairs.is_apart(target, source) and stored_weights.is_same(target, source):
            target[0]._parameters[target[1]] = source[0]._parameters[source[1]]


@contextlib.contextmanager
def merging(model: Any, *, merge: bool = True) -> Iterator[list[Any]]:
    """Inside, layers of a split model are merged through :func:`onload_layer`; yields its pairs of tied weights."""
    if not any(module_hooks.offload_hook(module) for module in walk.modules(model)):
        yield []
        return
    pairs = _pairs(model)
    try:
        with in_place.bound(_merging, pairs if merge else None):
            yield pairs
    finally:
        if any(_UNMERGE in vars(module) for module in walk.modules(model)):
            _unmerge_before_forwards(model)


def dispatched(model: Any) -> None:
    """Have layers that were merged before this dispatch unmerge like those that were merged after it."""
    merged = [module for module in walk.modules(model) if getattr(module, "merged_adapters", None)]
    if not merged:
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    pairs = tied_pairs.tied(base)
    for layer in merged:
        inner = walk.innermost(layer)
        if module_hooks.offload_hook(inner) is not None or _with(inner, pairs):
            in_place.replace(layer, _UNMERGE, functools.partial(_unmerge, layer, pairs))
            _unmerge_before_forwards(base)


def are_tied(model: Any, pairs: list[Any]) -> bool:
    """Whether the model's current input and output embeddings are one of the ``pairs``."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    in_use = {walk.in_use(module) for module in embeddings if module is not None}
    return any({target[0], source[0]} == in_use for target, source in pairs)


def onload_layer(layer: Any) -> contextlib.AbstractContextManager[None] | None:
    """For PEFT's function of that name: the context for a merge or unmerge of ``layer``; None leaves it to PEFT."""
    try:
        pairs = _merging.get()
    except LookupError:
        return contextlib.nullcontext() if _UNMERGE in vars(layer) else None  # the layer's ``unmerge`` onloads it
    if pairs is None or not _changes_weights(layer):
        return contextlib.nullcontext()
    return onloaded(layer, pairs)


def is_merged_alone(layer: Any) -> bool:
    """Whether a ``merge`` of this layer, as it is now, would miss its weight or a weight tied to it."""
    if layer is _onloaded.get():
        return False
    return any(module_hooks.is_offloaded(module) for module in layer.modules()) or bool(
        _with(walk.innermost(layer), _pairs(_model_of(layer)))
    )


def merge_alone(layer: Any, *, safe_merge: bool, adapter_names: Any) -> None:
    """What ``layer.merge`` does, if :func:`is_merged_alone`."""
    model = _model_of(layer)
    with onloaded(layer, _pairs(model)):
        layer.merge(safe_merge=safe_merge, adapter_names=adapter_names)
    if model is not None and _UNMERGE in vars(layer):
        _unmerge_before_forwards(model)


def _model_of(layer: Any) -> Any:
    """The dispatched model, inside PEFT's wrapper; None for a layer without offloaded weights."""
    model = joined_weights.model_of(walk.innermost(layer))
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _pairs(model: Any) -> list[Any]:
    """Tied weights of a dispatched model that a merge changes together."""
    return [] if model is None else [pair for pair in tied_pairs.tied(model) if pair not in _parted.get()]


def _with(base: Any, pairs: list[Any]) -> list[Any]:
    """The ``pairs`` that include a weight of ``base``, which comes first."""
    return [pair if pair[0][0] is base else pair[::-1] for pair in pairs if base in (pair[0][0], pair[1][0])]


def _changes_weights(layer: Any) -> bool:
    return hasattr(layer, "merged_adapters") or hasattr(type(layer), "unload_and_optionally_merge_module")


@contextlib.contextmanager
def onloaded(layer: Any, pairs: list[Any]) -> Iterator[None]:
    """Inside, ``layer`` can be merged or unmerged; afterwards its base weight and tied weights are stored."""
    base = walk.innermost(layer)
    tied = [(own, other) for own, other in _with(base, pairs) if stored_weights.is_same(own, other)]
    layers = [module for module in layer.modules() if hasattr(module, "merged_adapters")]
    before = [list(module.merged_adapters) for module in layers]
    offloaded = {
        module: module_hooks.offload_hook(module) for module in layer.modules() if module_hooks.is_offloaded(module)
    }
    for module, hook in offloaded.items():
        hook.pre_forward(module)
    try:
        with in_place.bound(_onloaded, layer), module_hooks.hooks_off(offloaded):
            yield
    finally:
        values = dict(base._parameters)
        for module, hook in offloaded.items():
            hook.post_forward(module, None)
        if [list(module.merged_adapters) for module in layers] != before:
            if module_hooks.offload_hook(base) is not None:
                shared = any(base in (pair[0][0], pair[1][0]) for pair in _parted.get())
                _store(base, values, in_forward=base not in offloaded, in_place=not shared)
            for own, other in tied:
                tied_pairs.tie(other, own)
        for module in layers:
            in_place.restore(module, _UNMERGE, _unmerge)
            if module.merged_adapters and (tied or module_hooks.offload_hook(base) is not None):
                in_place.replace(module, _UNMERGE, functools.partial(_unmerge, module, pairs))


def _store(base: Any, values: dict[str, Any], *, in_forward: bool, in_place: bool) -> None:
    for name, value in values.items():
        if value is not None:
            stored_weights.write(base, name, value, in_place=in_place)
        if type(value).__name__ == "Int8Params":
            stored_weights.write_scales(base, value.SCB)
    if in_forward:  # the forward ends with these values, and takes them out
        base._parameters.update(values)


def _unmerge(layer: Any, pairs: list[Any], below: Any) -> None:
    in_place.restore(layer, _UNMERGE, _unmerge)
    with onloaded(layer, pairs):
        below()


def _unmerge_before_forwards(model: Any) -> None:
    """Unmerge layers with disabled adapters before layers are onloaded: otherwise their forward would do it."""
    import torch

    if _HANDLE not in vars(model):
        hook = torch.compiler.disable(_unmerge_disabled)
        vars(model)[_HANDLE] = model.register_forward_pre_hook(hook, prepend=True)


def _unmerge_disabled(model: Any, _inputs: Any) -> None:
    merged = [module for module in walk.modules(model) if _UNMERGE in vars(module)]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for layer in merged:
        # The head is in no module group. On one device its weight, which the embedding shares, changes only when the
        # head's own forward runs.
        if layer.disable_adapters and layer is not head:
            layer.unmerge()
    if not any(_UNMERGE in vars(layer) for layer in merged) and _HANDLE in vars(model):
        vars(model).pop(_HANDLE).remove()
