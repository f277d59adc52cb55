"""Row lookup: an offloaded embedding reads rows from its stored weight instead of onloading the weight.

There are two ways. Both are bit-exact, because the embedding's own forward computes on its device in both:

* *in place*: during the forward, the module's weight is the stored one, addressed from the module's device. On a GPU
  that is pinned host memory under its device address, and the lookup kernel reads the rows over PCIe: no copy, no
  synchronization. On the CPU it is the memory-mapped file.
* *rows*: if the memory cannot be pinned, a weight on disk serves a GPU, or it is stored in another dtype, the tokens
  come to the host. Their distinct rows are gathered into a small weight on the device, and the tokens are renumbered
  to match. Only if the embedding is known to use its weight for nothing else.

A head that is tied to an embedding computes few rows *in place* as well, by the kernels that read a copy of its weight
otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import read_ahead

#: Rows that a head computes in place at most. A tile of the tensor cores has as many or more, so no kernel reads the
#: weight twice; more rows may take several tiles, and a copy crosses the bus once.
MOST_ROWS = 8
_ALIGNMENT = 16  # bytes
_STATE, _WARNED = attached.LOOKUP, attached.LOOKUP_WARNED
_log = logging.getLogger("gemma4_compat")


class Lookup:
    """The lookup of one offloaded ``nn.Embedding``, or of a head in place.

    Args:
        module: the embedding or head; its weight, of shape [rows, width], is on meta.
        hook: accelerate's hook that offloads it.

    Attributes:
        weight: the parameter that is read in place, on the module's device; None if rows are gathered.
        is_used: whether the last forward of the module used it.
        has_rows: whether the last forward of a head gave it hidden states, and did not ask for the whole weight.
    """

    def __init__(self, module: Any, hook: Any) -> None:
        import torch

        self.weights_map = hook.weights_map
        self.device = module_hooks.execution_device(module)
        self.dtype = module._parameters["weight"].dtype  # the parameter's: the model may have been cast
        self.meta: Any = None  # the parameter between forwards, while a forward runs
        self.copied: Any = None  # the same, while a forward runs with a copy that accelerate made
        self._padding: Any = None
        self.weight: Any = None
        self.is_used = self.has_rows = False
        # A tensor created in inference mode could not take part in later training.
        with torch.inference_mode(False):
            stored = self._stored = host_memory.stored(hook.weights_map, "weight")
            if stored.raw.device.type != "cpu":
                # Dispatched from the accelerator: accelerate's host copy never left it.
                stored.raw = stored.raw.cpu()
                if stored.holder is not None:
                    stored.holder[stored.key] = stored.raw
            if stored.casts or stored.raw.dtype != self.dtype:
                return
            if "weight" in hook.tied_params_names and not stored.on_disk:
                _align(stored, hook.tied_params_map)
            if self.device.type == "cpu":
                self.weight = _parameter(stored.raw)
            elif not stored.on_disk:  # pinning a mapped file would use the memory that "disk" saves
                memory = host_memory.pin(stored.raw, self.device)
                view = None if memory is None else memory.view_on(self.device)
                self.weight = None if view is None else _parameter(view)

    @property
    def in_place(self) -> bool:
        return self.weight is not None

    @property
    def computes(self) -> bool:
        """Whether a head may read it."""
        return self.weight is not None and not self._stored.on_disk and not self.weight.data_ptr() % _ALIGNMENT

    def is_current(self, hook: Any, module: Any) -> bool:
        """Whether the stored weight, its dtype and the execution device are still the same."""
        where = self._stored
        return (
            self.weights_map is hook.weights_map
            and (where.holder is None or where.holder.get(where.key) is where.raw)
            and self.dtype is module._parameters["weight"].dtype
            and self.device == module_hooks.execution_device(module)
        )

    def enter(self, module: Any, tokens: Any) -> Any:
        """Give the module a weight for its forward; returns the tokens that belong to that weight.

        Args:
            module: the embedding.
            tokens: integer tensor of any shape, on any device.
        """
        import torch

        self.leave(module)
        self.is_used = True
        meta = module._parameters["weight"]
        # Gradients of the embeddings are available; those of the weight itself are not.
        learns = meta.requires_grad and torch.is_grad_enabled()
        if self.in_place:
            weight = _parameter(self.weight, learns=True) if learns else self.weight
        else:
            rows, tokens = gather(self._stored.raw, tokens, self.device, mapped=self._stored.on_disk)
            weight = _parameter(host_memory.cast(rows, (*self._stored.casts, self.dtype)), learns=learns)
            # The small weight has no row with that number, which only matters to gradients of the weight.
            self._padding, module.padding_idx = module.padding_idx, None
        self.meta, module._parameters["weight"] = meta, weight
        return tokens

    def leave(self, module: Any) -> None:
        """Put the meta parameter back. Does nothing outside a forward."""
        if self.meta is not None:
            if self._padding is not None:
                module.padding_idx, self._padding = self._padding, None
            module._parameters["weight"], self.meta = self.meta, None

    def __deepcopy__(self, _memo: Any) -> None:
        return None  # a copied module creates its own

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())


def gather(weight: Any, tokens: Any, device: Any, *, mapped: bool = False) -> tuple[Any, Any]:
    """The rows of a weight on the host that ``tokens`` need, on ``device``, and the tokens renumbered to them.

    Args:
        weight: [rows, width], on the CPU.
        tokens: integers of any shape, on any device.
        device: where both results go.
        mapped: the weight is mapped from a file.

    Returns:
        [distinct tokens, width] in the weight's dtype, and the tokens' row numbers in the tokens' shape and dtype.
    """
    import torch

    distinct, renumbered = torch.unique(tokens.cpu(), return_inverse=True)
    if mapped:
        read_ahead.rows(weight, distinct.tolist())
    with torch.no_grad():
        if torch.device(device).type != "cuda":
            return weight.index_select(0, distinct.long()).to(device), renumbered.to(device, tokens.dtype)
        rows = host_memory.staging((distinct.numel(), weight.shape[1]), weight.dtype)
        torch.index_select(weight, 0, distinct.long(), out=rows)
        return rows.to(device, non_blocking=True), renumbered.to(device, tokens.dtype)


def lookup_for(hook: Any, module: Any) -> Lookup | None:
    """The lookup of an embedding that this hook offloads; None if the module needs its whole weight.

    It needs the whole weight if that is trained, is renormalized in a forward, has its own class (quantized, for
    example) or is tied to a weight on the device, and if the module has other tensors to onload.
    """
    import torch

    found = _left(hook, module)
    weight = module._parameters.get("weight")
    if weight is None or (weight.requires_grad and module.training and torch.is_grad_enabled()):
        return None
    if module.max_norm is not None or module_hooks.offload_hook(module) is not hook:
        return None
    return _current(found, hook, module, weight)


def head_for(hook: Any, module: Any, given: Any) -> Lookup | None:
    """The lookup of a head that this hook offloads, which computes ``given`` in place; None if its weight is copied.

    It is copied for more than :data:`MOST_ROWS` rows, where gradients are enabled, from a disk, into another dtype,
    and where memory cannot be pinned or is not aligned as cuBLAS asks for: another kernel might compute it.

    Args:
        hook: of the head.
        module: the head, for which :func:`may_look_up` is true.
        given: hidden states of any shape, on any device; None for who wants the whole weight.
    """
    import torch

    found, weight = _left(hook, module), module._parameters["weight"]
    few = given is not None and given.numel() <= MOST_ROWS * module.in_features
    captured = found is not None and found.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if found is not None:
        found.has_rows = given is not None
    if given is None or torch.is_grad_enabled() or not (few or captured):  # a copy would end a capture
        if found is not None and weight.device.type == "meta":
            found.copied = weight
        return None
    found = None if module_hooks.offload_hook(module) is not hook else _current(found, hook, module, weight)
    if found is None or not found.computes:
        return None
    found.has_rows = True
    return found


def _align(stored: host_memory.Stored, addresses: dict[int, Any]) -> None:
    """Have the host keep a weight and what is tied to it where a head can read them: files do not align tensors."""
    import torch

    before, holder = stored.raw, stored.holder
    if holder is None or not before.data_ptr() % _ALIGNMENT:
        return
    where = before.data_ptr(), before.shape, before.dtype
    tensors = {key: one for key, one in holder.items() if isinstance(one, torch.Tensor)}
    tied = [key for key, one in tensors.items() if (one.data_ptr(), one.shape, one.dtype) == where]
    if len(tied) > 1:
        stored.raw = torch.empty_like(before, memory_format=torch.contiguous_format).copy_(before)
        holder.update(dict.fromkeys(tied, stored.raw))
        addresses.pop(before.data_ptr(), None)  # accelerate's, of tied weights; it may soon be another tensor's


def may_look_up(hook: Any, module: Any) -> bool:
    """Whether a module that this hook offloads is an embedding, or a plain linear layer tied to one."""
    import torch

    is_tied = type(module) is torch.nn.Linear and "weight" in hook.tied_params_names
    return is_tied or isinstance(module, torch.nn.Embedding)


def _left(hook: Any, module: Any) -> Lookup | None:
    """The lookup of a hook, before a forward."""
    found: Lookup | None = vars(hook).get(_STATE)
    if found is not None:
        found.is_used = False
        found.leave(module)  # a failed forward left its weight in
    return found


def _current(found: Lookup | None, hook: Any, module: Any, weight: Any) -> Lookup | None:
    """The lookup that was found, or a new one; None if the module needs its whole weight on the device."""
    import torch

    if found is not None and found.is_current(hook, module):
        return found
    if type(weight) is not torch.nn.Parameter or weight.device.type != "meta" or _is_tied_on_device(hook, module):
        return None
    others = [tensor for tensor in (*module.parameters(), *module.buffers()) if tensor is not weight]
    if any(tensor.device.type == "meta" for tensor in others):
        return None
    found = vars(hook)[_STATE] = Lookup(module, hook)
    return found


def was_copied(hook: Any, module: Any) -> None:
    """After accelerate has put a head on meta again: give it the parameter that it had, which guards know."""
    found: Lookup | None = vars(hook).get(_STATE)
    if found is not None and found.copied is not None:
        now, meta = module._parameters["weight"], found.copied
        if (now.device, now.dtype, now.requires_grad) == (meta.device, meta.dtype, meta.requires_grad):
            module._parameters["weight"] = meta
        found.copied = None


def known(hook: Any, rows: int = 0) -> Lookup | None:
    """The lookup that the last forward of this hook's module used; None if it used none.

    ``rows``: of the next forward of a head, without gradients. It may be in place though the last one was not, which
    had more rows or gradients; a replayed forward is not seen here.
    """
    found: Lookup | None = vars(hook).get(_STATE)
    if found is None or found.is_used:
        return found
    return found if found.has_rows and found.computes and 0 < rows <= MOST_ROWS else None


def weight_of(module: Any, rows: int) -> Any:
    """The weight of a head as a forward with so many rows reads it: in place where it is stored, if it is there."""
    hook = module_hooks.offload_hook(module)
    found = None if hook is None else known(hook, rows)
    is_current = found is not None and found.in_place and found.is_current(hook, module)
    return found.weight if found is not None and is_current else module.weight


def places(modules: Iterable[Any]) -> list[Place]:
    """Where modules that may read their weights in place have them."""
    pairs = ((module_hooks.offload_hook(module), module) for module in modules)
    found = [(hook, module) for hook, module in pairs if hook is not None and may_look_up(hook, module)]
    return [Place(hook) for hook, module in found if module._parameters.get("weight") is not None]


class Place:
    """Where an offloaded module's weight is stored, for guards.

    Args:
        hook: of the module.
    """

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def host_entries(self) -> list[tuple[dict[Any, Any], Any]]:
        """As of a :class:`module_groups.ModuleGroup`."""
        one = host_memory.stored(self._hook.weights_map, "weight")
        return [] if one.holder is None else [(one.holder, one.key)]

    def hook_entries(self) -> list[tuple[dict[Any, Any], Any]]:
        """As of a :class:`module_groups.ModuleGroup`."""
        return [(vars(self._hook), "weights_map")]


def current(hook: Any) -> Lookup | None:
    """The lookup whose weight the hook's module holds right now."""
    found = known(hook)
    return None if found is None or found.meta is None else found


def reads_rows_only(module: Any) -> bool:
    """Whether the forward of a hooked embedding only looks up its first argument in its weight.

    Learned positions, for example, look up numbers that they compute from an attention mask.
    """
    import torch

    if getattr(vars(module).get("_old_forward"), "__func__", None) is torch.nn.Embedding.forward:
        return True
    return module_hooks.gemma4_forward(module, "TextScaledWordEmbedding.forward") is not None


def _is_tied_on_device(hook: Any, module: Any) -> bool:
    """Whether the weight is tied to one that stays on the hook's device: accelerate then uses that one."""
    if not hook.tied_params_map or "weight" not in hook.tied_params_names:
        return False
    where = host_memory.stored(hook.weights_map, "weight")
    copies = {} if where.on_disk else hook.tied_params_map.get(where.raw.data_ptr(), {})
    if not any(str(key) == str(hook.execution_device) for key in copies):
        return False
    if not vars(hook).get(_WARNED) and hasattr(module, "num_embeddings"):
        vars(hook)[_WARNED] = True
        weight = module._parameters["weight"]
        size = weight.numel() * weight.element_size() / 2**30
        _log.warning(
            "gemma4_compat: an embedding of %s rows is off the accelerator, but the head tied to it computes on %s "
            "and keeps a copy of %.2f GiB there. Give both the same device_map entry to save one of the two.",
            *(weight.shape[0], hook.execution_device, size),
        )
    return True


def _parameter(tensor: Any, *, learns: bool = False) -> Any:
    import torch

    return torch.nn.Parameter(tensor, requires_grad=learns)
