"""Compute with 4-bit experts and adapters on them. Imports nothing upstream at module level."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.quantization import expert_storage
from gemma4_compat._gemma4.quantization.expert_storage import dequantized
from gemma4_compat._gemma4.quantization.experts import NAMES, quantized_parameter
from gemma4_compat._gemma4.state import checkpointing

_ADDED = attached.ADDED


def forward(original: Callable[..., Any], self: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    """``Gemma4TextExperts.forward`` by upstream's own code, over the dequantized weights of the experts that are hit.

    The backward pass keeps the packed weights and dequantizes them again. ``torch.compile`` must be able to trace this
    as one graph.

    Raises:
        Gemma4CompatError: the packed weights have lost their scales.
    """
    if not any(hasattr(getattr(self, name, None), "quant_state") for name in NAMES):
        refuse_packed(self)
        return original(self, hidden_states, top_k_index, top_k_weights)
    added = getattr(self, _ADDED, {})
    multiply = multiplier(self, self._parameters, hidden_states, top_k_index)
    if multiply is not None:
        return multiply(self, self._parameters, hidden_states, top_k_index.flatten(), top_k_weights)
    chosen = hit(self, top_k_index) if can_choose(self) else None
    plain, make = {}, {}
    for name in NAMES:
        parameter = getattr(self, name)
        if hasattr(parameter, "quant_state"):
            make[name] = functools.partial(values_of, parameter, chosen, added.get(name, ()))
        else:
            plain[name] = parameter if chosen is None else parameter[chosen]
    number = self.num_experts if chosen is None else len(chosen)
    if chosen is not None:
        top_k_index = positions(chosen, top_k_index)

    def run(substitute: Any) -> Any:
        return original(substitute, hidden_states, top_k_index, top_k_weights)

    return with_values(run, self, number, make, plain)


def multiplier(module: Any, weights: Mapping[str, Any], hidden_states: Any, top_k_index: Any) -> Any:
    """What computes these experts from their packed weights, :func:`packed_linear.experts_forward`; None if no kernel
    multiplies by them, or something is added to them.
    """
    import torch

    if torch.compiler.is_compiling() or torch.is_grad_enabled() or added_to(module):
        return None
    parameters = [weights[name] for name in NAMES]
    if getattr(module, "_is_expert_parallel", False) or not all(hasattr(one, "quant_state") for one in parameters):
        return None
    from gemma4_compat._gemma4.quantization import packed_linear

    multiplies = packed_linear.multiplies_experts(hidden_states, top_k_index.flatten(), parameters)
    return packed_linear.experts_forward if multiplies else None


def with_values(
    run: Callable[[Any], Any],
    module: Any,
    number: int,
    make: Mapping[str, Callable[[], Any]],
    plain: Mapping[str, Any],
) -> Any:
    """Run the forward of an experts module with other weights of so many experts, which autograd does not save.

    ``run`` calls it on what stands in for the module. ``make`` makes a weight, and makes it again in the backward
    pass; ``plain`` has the others.
    """
    import torch

    weights = {**plain, **{name: again() for name, again in make.items()}}
    substitute = PlainView(module, num_experts=number, **weights)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return run(substitute)
    with _kept_packed(weights, make):
        return run(substitute)


def refuse_packed(module: Any) -> None:
    """Refuse packed weights without their scales: a column of numbers instead of a matrix per expert."""
    for name in NAMES:
        weight = getattr(module, name, None)
        if weight is not None and weight.ndim == 2 and weight.shape[1] == 1:
            raise Gemma4CompatError(
                f"experts.{name} holds packed 4-bit weights, shape {tuple(weight.shape)}, without their scales: a "
                "plain tensor has taken its place, as FSDP2 puts in for each weight that it shards. Leave experts "
                "out, fully_shard(..., ignored_params={...}), or load without quantize(experts=True)."
            )


def hit(module: Any, top_k_index: Any) -> Any:
    """The indices of the experts that tokens are routed to, ascending; None for all of them."""
    import torch

    if (
        top_k_index.numel() >= module.num_experts
        or torch.compiler.is_compiling()  # their number would depend on the data
        or getattr(module, "_is_expert_parallel", False)  # then some indices stand for no expert
    ):
        return None
    return numbers(top_k_index, module.num_experts)


_captured = contextvars.ContextVar("gemma4_compat_experts_captured", default=False)


def captured() -> contextlib.AbstractContextManager[None]:
    """Inside, a graph is captured, and the host cannot wait for how many experts are hit."""
    return in_place.bound(_captured, True)


#: Up to this share of the experts, the experts that tokens are routed to are mostly distinct.
_MOSTLY_DISTINCT = 0.25


def numbers(top_k_index: Any, number: int) -> Any:
    """The indices in ``top_k_index``, ascending, or unsorted if a :class:`expert_storage.Reader` accepts that.

    For one or a few tokens, and inside :func:`captured`: one entry per pair, including duplicates. This needs no
    synchronization. For more tokens: each index once. :func:`positions` finds the first of equal entries, so
    duplicates are dequantized for nothing.

    Args:
        top_k_index: int64, (tokens, experts per token).
        number: of experts in the layer.
    """
    import torch

    if _in_order(top_k_index) is not None:
        return top_k_index.flatten()
    if _captured.get() or len(top_k_index) == 1 or top_k_index.numel() <= _MOSTLY_DISTINCT * number:
        return top_k_index.flatten().sort().values
    return torch.unique(top_k_index)


def positions(chosen: Any, top_k_index: Any) -> Any:
    """The positions of ``top_k_index``'s entries in ``chosen``, which :func:`numbers` returned for it; same shape."""
    import torch

    found = _in_order(top_k_index)
    return torch.searchsorted(chosen, top_k_index) if found is None else found


def _in_order(top_k_index: Any) -> Any:
    """The positions of one token's experts, if they are read in the token's own order."""
    reader = expert_storage.reading() if len(top_k_index) == 1 else None
    return None if reader is None else reader.positions(top_k_index)


#: Class of PEFT's addition -> its tensors that have a part for each expert.
_PARTS = {"_LoraParameterProxy": ("delta_weight",), "_LoraFactorsProxy": ("lhs", "rhs")}


def added_to(module: Any) -> dict[str, tuple[Callable[[Any], Any], ...]]:
    """What the current forward of PEFT adds to the 4-bit parameters of an experts module, by parameter name."""
    found: dict[str, tuple[Callable[[Any], Any], ...]] = vars(module).get(_ADDED, {})
    return found


def can_choose(module: Any) -> bool:
    """Whether a forward of ``module`` only needs the experts that are hit.

    Not if something is added to all experts at once. In training, PEFT adds to all of them.
    """
    import torch

    added = getattr(module, _ADDED, {})
    if added and torch.is_grad_enabled():
        return False
    return all(_is_per_expert(add, module.num_experts) for every in added.values() for add in every)


def _is_per_expert(add: Any, number: int) -> bool:
    parts = _PARTS.get(type(add).__name__, ())
    tensors = [vars(add).get(name) for name in parts]
    return bool(parts) and all(tensor is not None and tensor.ndim == 3 and len(tensor) == number for tensor in tensors)


def _for_chosen(add: Any, chosen: Any) -> Any:
    """What PEFT adds, for only the chosen experts."""
    some = copy.copy(add)
    for name in _PARTS[type(add).__name__]:
        vars(some)[name] = vars(add)[name].index_select(0, chosen)
    return some


def values_of(
    parameter: Any,
    chosen: Any,
    added: Iterable[Callable[[Any], Any]],
    rows: Callable[[Any, Any], Any] | None = None,
    at: Any = None,
) -> Any:
    """The values of a 4-bit parameter, as from :func:`expert_storage.dequantized`, plus what PEFT adds to them.

    ``at``: where the ``chosen`` experts are in the parameter, if it does not have all.
    """
    values = dequantized(parameter, chosen if at is None else at, rows)
    for add in added:
        values = add(values) if chosen is None else _for_chosen(add, chosen)(values)
    return values


def current(module: Any, name: str) -> Any:
    """The values of all experts that a forward of ``module`` would use now, including what PEFT adds."""
    if quantized_parameter(module, name) is None:
        return getattr(module, name)
    return values_of(module._parameters[name], None, added_to(module).get(name, ()))


def logical(module: Any, name: str) -> Any:
    """An expanded zero with the shape, dtype and compute device of a 4-bit parameter's values; takes no memory."""
    import torch

    parameter = quantized_parameter(module, name)
    state = parameter.quant_state
    device = module_hooks.execution_device(module) or parameter.device
    return torch.zeros(1, dtype=state.dtype, device=device).expand(state.shape)


@contextlib.contextmanager
def _kept_packed(weights: Mapping[str, Any], make: Mapping[str, Callable[[], Any]]) -> Iterator[None]:
    """Inside, autograd saves how to ``make`` these ``weights`` again instead of saving them: in bf16, all experts
    together would be as large as the unquantized model. Other tensors are handed to the outer hooks, such as those of
    a checkpoint: PyTorch calls only the innermost ones.
    """
    import torch

    known = {weights[name].untyped_storage()._cdata: again for name, again in make.items()}
    keep, bring = checkpointing.saved_tensors_hooks() or (_as_it_is, _as_it_is)

    def pack(tensor: Any) -> Any:
        again = known.get(tensor.untyped_storage()._cdata)
        if again is None:
            return None, keep(tensor)
        return again, (tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(kept: Any) -> Any:
        again, rest = kept
        if again is None:
            return bring(rest)
        with torch.no_grad():
            return again().as_strided(*rest)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _as_it_is(kept: Any) -> Any:
    return kept


@contextlib.contextmanager
def adding(module: Any, name: str, add: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, ``add`` is applied to the values of the 4-bit parameter ``name`` in forwards of ``module``."""
    added = added_to(module)
    vars(module)[_ADDED] = added | {name: (*added.get(name, ()), add)}
    try:
        yield
    finally:  # forwards of several threads end in any order: each removes its own
        added = added_to(module)
        left = tuple(one for one in added.get(name, ()) if one is not add)
        rest = {key: found for key, found in (added | {name: left}).items() if found}
        if rest:
            vars(module)[_ADDED] = rest
        else:
            vars(module).pop(_ADDED, None)
