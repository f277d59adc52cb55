"""Expert lookup: a step reads only the experts of an offloaded layer that its tokens are routed to, in place.

A token uses 8 of the 128 experts of a layer of the 26B-A4B: streaming the layer copies sixteen times what is used. So
for few tokens the experts stay in host memory, and :mod:`streaming` copies only the rest of the layer. As in
:mod:`row_lookup` there are two ways, with the same bits:

* *in place*: the device addresses the weights, which are pinned host memory, and the kernel that gathers the experts'
  rows reads them over PCIe. Expert indices stay on the device: nothing synchronizes, and a CUDA graph can capture it.
  On the CPU the weights are the host memory or the memory-mapped file.
* *rows*: for experts on disk and a GPU, the indices come to the host, which copies the rows through pinned memory.

Everything a layer reads from disk for a step is requested before the first of it is copied.

Some of the rows may also be on the device, in *slots*: see :func:`kept_in`.

Upstream's own forward computes with these experts' weights, as it does with 4-bit experts on the device.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.quantization import expert_forward, expert_storage, experts, quant_states
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import read_ahead


class Slots(Protocol):
    """Rows of some of a layer's experts on the device.

    Attributes:
        number: of slots.
        weights: as those of the lookup, with a slot in place of each expert.
    """

    number: int
    weights: Mapping[str, Any]

    def bring(self, chosen: Any, memory: Any) -> Any:
        """The slots, int64 (n,), that have the ``chosen`` experts from now on; at most as many as there are.

        ``memory``: of the lookup.
        """


_slots: contextvars.ContextVar[Mapping[ExpertLookup, Slots]] = contextvars.ContextVar(
    "gemma4_compat_expert_slots", default=types.MappingProxyType({})
)


def kept_in(slots: Mapping[ExpertLookup, Slots]) -> contextlib.AbstractContextManager[None]:
    """Inside, lookups that have slots read experts from there, and have those brought that are not there.

    It is for steps, one at a time: they change the slots.
    """
    return in_place.bound(_slots, slots)


class ExpertLookup:
    """Computes the forward of an experts module whose weights are on the host.

    Args:
        module: the experts; its parameters are on meta.
        forward: the function of its class.
        weights: by name, in place of its parameters: bf16, or 4-bit with a quantization state. Tensors with one row
            per expert are on the host, or addressed from ``device``; code books are on ``device``.
        device: where the module computes.
        mapped: the tensors, mapped from files, that have the values of every expert in a row.
        memory: the buffer that the tensors with one row per expert are in, addressed from ``device``; None for files.

    Attributes:
        module, weights, device, memory: as given.
    """

    def __init__(
        self,
        module: Any,
        forward: Callable[..., Any],
        weights: Mapping[str, Any],
        device: Any,
        mapped: Iterable[Any] = (),
        memory: Any = None,
    ) -> None:
        import torch

        self._mapped = [tensor.view(module.num_experts, -1) for tensor in mapped]
        self.module, self.weights, self.device, self.memory = module, dict(weights), device, memory
        self._forward = forward
        at = next(iter(weights.values())).device
        self._rows = expert_storage.rows_of if at.type == device.type else functools.partial(fetched, device=device)
        self._compute = torch.compiler.disable(self._compute_with_rows)  # which experts it needs depends on the data

    def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """Return what the module's forward returns for these arguments."""
        return self._compute(hidden_states, top_k_index, top_k_weights)

    def _compute_with_rows(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        import torch

        chosen = expert_forward.numbers(top_k_index, self.module.num_experts)
        found = expert_forward.positions(chosen, top_k_index)
        added = expert_forward.added_to(self.module)
        if not expert_forward.can_choose(self.module):
            chosen, found = torch.arange(self.module.num_experts, device=chosen.device), top_k_index
        if self._mapped:
            numbers = chosen.tolist()
            for tensor in self._mapped:
                read_ahead.rows(tensor, numbers)
        slots, at = _slots.get().get(self), chosen
        weights: Mapping[str, Any] = self.weights
        if slots is not None and len(chosen) <= slots.number:
            weights, at = slots.weights, slots.bring(chosen, self.memory)
        multiply = expert_forward.multiplier(self.module, self.weights, hidden_states, top_k_index)
        if multiply is not None:
            own = found.flatten()
            if weights is self.weights:
                weights = {name: self._copied(one, chosen) for name, one in weights.items()}
            else:
                own = at[own]
            return multiply(self.module, weights, hidden_states, own, top_k_weights)
        values = {name: self._values(weight, chosen, added.get(name, ()), at) for name, weight in weights.items()}
        substitute = PlainView(self.module, num_experts=len(chosen), **values)
        return self._forward(substitute, hidden_states, found, top_k_weights)

    def _copied(self, weight: Any, chosen: Any) -> Any:
        """The packed weights of these experts, on the device."""
        state, packed = weight.quant_state, weight.data.view(self.module.num_experts, -1)
        copies = {id(one): self._rows(one, chosen) if per_expert(one) else one for one in quant_states.tensors(state)}
        own = quant_states.with_tensors(state, copies)
        own.shape = type(state.shape)((len(chosen), *state.shape[1:]))
        return expert_storage.with_state(self._rows(packed, chosen).view(-1, 1), own)

    def _values(self, weight: Any, chosen: Any, added: Iterable[Callable[[Any], Any]], at: Any) -> Any:
        if hasattr(weight, "quant_state"):
            return expert_forward.values_of(weight, chosen, added, self._rows, at)
        return self._rows(weight, at)


def fetched(tensor: Any, chosen: Any, *, device: Any) -> Any:
    """:func:`expert_storage.rows_of` a tensor on the host, for another device: the indices come to the host.

    Args:
        tensor: (experts, ...), contiguous, on the CPU; it may be a memory-mapped file.
        chosen: int64, on any device.
        device: where the rows go.
    """
    import torch

    rows = expert_storage.in_words(tensor)
    staged = host_memory.staging((len(chosen), rows.shape[1]), rows.dtype)
    with torch.no_grad():
        torch.index_select(rows, 0, chosen.cpu(), out=staged)
        on_device = staged.to(device, non_blocking=True)
    return on_device.view(tensor.dtype).view(len(chosen), *tensor.shape[1:])


def per_expert(tensor: Any) -> bool:
    """Whether a tensor of an experts module has one row per expert. The code books of its scales do not."""
    return bool(tensor.ndim > 1)


def inside(layer: Any) -> Any:
    """The experts module of a decoder layer if its forward can look experts up, else None.

    An adapter may wrap its parameters if they are in 4 bits; PEFT replaces bf16 ones. None if anything else wraps the
    module, if its forward is not upstream's, or in expert parallelism, where some indices stand for no expert.
    """
    outer = getattr(layer, "_modules", {}).get("experts")
    module: Any = outer
    while type(module).__name__ == "ParamWrapper":
        module = module._modules.get("base_layer")
    if module is None or not experts.is_experts(module) or getattr(module, "_is_expert_parallel", False):
        return None
    if module is not outer and any(experts.quantized_parameter(module, name) is None for name in experts.NAMES):
        return None
    return module if forward_of(module) is not None else None


def forward_of(module: Any) -> Callable[..., Any] | None:
    """The function that accelerate's hook on an experts module calls, if it is upstream's own."""
    return module_hooks.gemma4_forward(module, "TextExperts.forward")


def few_tokens(module: Any, layer: Any, inputs: Any) -> bool:
    """Whether a layer's inputs select fewer experts than there are, counting repeats, and need no gradient.

    Args:
        module: the experts of ``layer``.
        layer: a decoder layer.
        inputs: the positional arguments of its forward; the first is (batch, tokens, hidden size).
    """
    import torch

    if torch.is_grad_enabled() or not inputs or not isinstance(inputs[0], torch.Tensor) or not inputs[0].numel():
        return False
    top_k = getattr(getattr(layer, "config", None), "top_k_experts", None)
    tokens = inputs[0].numel() // inputs[0].shape[-1]
    return top_k is not None and tokens * top_k < module.num_experts
