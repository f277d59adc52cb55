"""Expert lookup: of the experts of an offloaded layer, a step reads those that its tokens are sent to, where they are.

A token takes 8 of the 128 experts of a layer of the 26B-A4B: streaming the layer brings sixteen times what is used. So
for few tokens the experts stay in host memory, and :mod:`gemma4_compat._offload.streaming` brings the rest of the
layer alone. As in :mod:`gemma4_compat._offload.row_lookup` there are two ways, with the same bits:

* *in place*: the weights are addressed from the device, which is the pinned host memory under its device address, and
  the kernel that gathers the rows of the experts reads them over PCIe. The numbers of the experts stay on the device:
  nothing is synchronized, and a CUDA graph can hold it. On the CPU it is the host memory, or the memory-mapped file.
* *rows*: of experts on disk for a GPU, the numbers come to the host, which copies the rows through pinned memory.

Of experts on disk, all that a layer reads for a step is announced before the first of it is copied.

Upstream's own forward computes with the weights of these experts, as it does with experts in 4 bits on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gemma4_compat._offload import host_memory, read_ahead
from gemma4_compat._quantization import expert_forward, expert_storage, experts


class ExpertLookup:
    """What computes the forward of an experts module whose weights are on the host.

    Args:
        module: the experts; its parameters are on meta.
        forward: the function of its class.
        weights: by name, in the place of its parameters: bf16, or 4-bit with a quantization state. Their tensors with
            a row an expert are on the host, or addressed from ``device``; their code books are on ``device``.
        device: where the module computes.
        mapped: the tensors with values of every expert, one after the other, that are mapped from files.
    """

    def __init__(
        self,
        module: Any,
        forward: Callable[..., Any],
        weights: Mapping[str, Any],
        device: Any,
        mapped: Iterable[Any] = (),
    ) -> None:
        import torch

        self._mapped = [tensor.view(module.num_experts, -1) for tensor in mapped]
        self._module, self._forward, self._weights = module, forward, dict(weights)
        at = next(iter(weights.values())).device
        self._rows = expert_storage.rows_of if at.type == device.type else functools.partial(fetched, device=device)
        self._compute = torch.compiler.disable(self._compute_with_rows)  # which experts it is depends on the data

    def __call__(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """What the module's forward returns, for its arguments."""
        return self._compute(hidden_states, top_k_index, top_k_weights)

    def _compute_with_rows(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        import torch

        chosen = expert_forward.numbers(top_k_index, self._module.num_experts)
        found = expert_forward.positions(chosen, top_k_index)
        added = expert_forward.added_to(self._module)
        if not expert_forward.can_choose(self._module):
            chosen, found = torch.arange(self._module.num_experts, device=chosen.device), top_k_index
        if self._mapped:
            numbers = chosen.tolist()
            for tensor in self._mapped:
                read_ahead.rows(tensor, numbers)
        values = {name: self._values(weight, chosen, added.get(name, ())) for name, weight in self._weights.items()}
        substitute = expert_forward.Substitute(self._module, len(chosen), **values)
        return self._forward(substitute, hidden_states, found, top_k_weights)

    def _values(self, weight: Any, chosen: Any, added: Iterable[Callable[[Any], Any]]) -> Any:
        if hasattr(weight, "quant_state"):
            return expert_forward.values_of(weight, chosen, added, self._rows)
        return self._rows(weight, chosen)


def fetched(tensor: Any, chosen: Any, *, device: Any) -> Any:
    """:func:`expert_storage.rows_of` a tensor on the host for another device: the numbers come to the host.

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
    """Whether a tensor of an experts module has a row for each of them: not so for the code books of its scales."""
    return bool(tensor.ndim > 1)


def inside(layer: Any) -> Any:
    """The experts module of a decoder layer whose forward can look its experts up; None where there is none.

    An adapter on their parameters may be around it where these are in 4 bits; those in bf16 PEFT replaces. Not where
    anything else is around it, nor where its forward is not upstream's, nor in expert parallelism, where some numbers
    stand for no expert.
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
    """The function that accelerate's hook on an experts module calls, if it is that of upstream's class."""
    function = getattr(vars(module).get("_old_forward"), "__func__", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    if function is None or not name.startswith("transformers.models.gemma4"):
        return None
    return function if name.endswith("TextExperts.forward") else None


def few_tokens(module: Any, layer: Any, inputs: Any) -> bool:
    """Whether the inputs of a layer have fewer places for experts than there are experts, and no gradient is wanted.

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
