"""Experts of offloaded layers on the card: those used last, in memory that only a prompt needs.

Steps have that memory: the first one of a ``generate`` takes it, and it is given back when its text ends, or another
prompt is read. It comes back at the same address, so graphs stay. What was in it is forgotten, however somebody has
written to the weights in host memory meanwhile. Within a ``generate`` only code of the user's could: where that runs
between two tokens, no experts are kept.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import weakref
from collections.abc import Mapping
from typing import Any

from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.quantization import expert_storage, quant_states
from gemma4_compat._graphs import decoder, deferred_stop
from gemma4_compat._kernels import card_memory
from gemma4_compat._kernels.specs import expert_slots
from gemma4_compat._memory import use
from gemma4_compat._offload.transfer import expert_lookup, streaming

_ALIGNMENT = 512  # bytes
_keys = itertools.count()
_log = logging.getLogger("gemma4_compat")


class Layer:
    """The slots of one layer: an :class:`expert_lookup.Slots`.

    Args:
        lookup: of the layer.
        number: of slots.
        memory: uint8, at least :func:`_size` bytes.
        state: int32, empty.
        counts: int64 (2), of all layers.
    """

    def __init__(self, lookup: expert_lookup.ExpertLookup, number: int, memory: Any, state: Any, counts: Any) -> None:
        import torch

        self.number, self._experts, begin = number, lookup.module.num_experts, 0
        views: dict[int, Any] = {}
        layout = []
        for tensor in _tensors(lookup):
            row = tensor.nbytes // self._experts
            layout.append((tensor.data_ptr() - lookup.memory.data_ptr(), begin, row))
            shape = (len(tensor) // self._experts * number, *tensor.shape[1:])
            views[id(tensor)] = memory[begin : begin + row * number].view(tensor.dtype).view(shape)
            begin += _aligned(row * number)
        self._own = torch.tensor(layout, device=memory.device), memory, state, counts, self._experts, number
        self.weights: Mapping[str, Any] = {
            name: _in_slots(weight, views, number) for name, weight in lookup.weights.items()
        }

    def bring(self, chosen: Any, memory: Any) -> Any:
        """See :class:`expert_lookup.Slots`."""
        import torch

        return torch.ops.gemma4_compat.bring(chosen, memory, *self._own)


class Kept:
    """The slots of all layers.

    Args:
        lookups: of the layers, at least one.
        number: of slots of each.

    Attributes:
        number: the same.
        key: no others have the same.
        layers: as :func:`expert_lookup.kept_in` takes them.
        nbytes: of memory that is given back.

    Raises:
        RuntimeError: the driver cannot do this.
        torch.OutOfMemoryError: there is not as much memory.
    """

    def __init__(self, lookups: list[expert_lookup.ExpertLookup], number: int) -> None:
        import torch

        device = lookups[0].device
        sizes = [_size(lookup, number) for lookup in lookups]
        self.number, self.nbytes, self.key = number, sum(sizes), next(_keys)
        self._memory = card_memory.MEMORIES[device.type](device, self.nbytes)
        if not self._memory.take():
            raise torch.OutOfMemoryError
        width = expert_slots.state_size(lookups[0].module.num_experts, number)
        self._states = torch.full((len(lookups), width), -1, dtype=torch.int32, device=device)
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.layers: weakref.WeakKeyDictionary[expert_lookup.ExpertLookup, Layer] = weakref.WeakKeyDictionary()
        parts = self._memory.tensor()[: self.nbytes].split(sizes)
        for lookup, part, state in zip(lookups, parts, self._states, strict=True):
            self.layers[lookup] = Layer(lookup, number, part, state, self._counts)

    def is_of(self, lookups: list[expert_lookup.ExpertLookup]) -> bool:
        """Whether these are the lookups that have slots."""
        return list(self.layers) == lookups

    @property
    def is_there(self) -> bool:
        """Whether it has its memory."""
        return bool(self._memory.is_there)

    def take(self) -> bool:
        """Have the memory, with empty slots. False if the card does not have as much."""
        self._states.fill_(-1)
        return bool(self._memory.take())

    def give_back(self) -> None:
        """Have no memory; no step may still run."""
        self._memory.give_back()

    def counts(self) -> tuple[int, int]:
        """Experts that were in a slot, and those that were not. Waits for the device."""
        kept, brought = self._counts.tolist()
        return int(kept), int(brought)


def of(decoding: decoder.Decoding, model: Any, rows: int) -> Kept | None:
    """The slots for a ``generate`` that has read its prompt, empty; None if no experts are kept.

    Args:
        decoding: of the model.
        model: of transformers.
        rows: of the batch, or tokens of a step.
    """
    import torch

    from gemma4_compat._kernels.match import custom

    if not decoding.preferred or not deferred_stop.no_user_code(model):
        return None
    if model.device.type not in card_memory.MEMORIES:
        return None
    found, kept = _lookups(model), decoding.experts
    if not found or custom.unsupported_reason(model.device) or not custom.brings_experts(model.device):
        return None
    if rows * model.config.get_text_config().top_k_experts >= found[0].module.num_experts:
        decoding.give_back_experts()  # whole layers are brought, into this memory
        return None
    most = number(decoding, model, rows, found)
    is_known = kept is not None and kept.is_of(found) and (kept.is_there or _suits(decoding, kept.number, most))
    if is_known and (again := taken(decoding, model.device)) is not None:
        return again
    decoding.drop_experts()
    try:
        with torch.inference_mode(False):
            decoding.experts = _made(decoding, model, rows, found, most)
    except RuntimeError as error:
        _say(str(error))
    return None if decoding.experts is None else taken(decoding, model.device)


def _suits(decoding: decoder.Decoding, known: int, most: int) -> bool:
    """Whether so many slots stay, where so many may be: about as many, or fewer while a graph reads them."""
    return 8 * most >= 7 * known and (8 * known >= 7 * most or any(one.reads_slots for one in decoding.steps.graphs()))


def _made(decoding: decoder.Decoding, model: Any, rows: int, found: Any, most: int) -> Kept | None:
    """At most so many slots; fewer where PyTorch keeps memory in parts that it does not use and cannot give back."""
    import torch

    least = model.config.get_text_config().top_k_experts
    with contextlib.suppress(torch.OutOfMemoryError):
        return Kept(found, most) if most >= least else None
    fewer = number(decoding, model, rows, found, unused=False)
    with contextlib.suppress(torch.OutOfMemoryError):
        return Kept(found, fewer) if fewer >= least else None
    return None


def taken(decoding: decoder.Decoding, device: Any) -> Kept | None:
    """The slots that a model has, empty; None if the card does not have as much memory now."""
    kept: Kept = decoding.experts
    if device.type == "cuda":
        decoding.follow_stream(device)  # of a step that reads them
    if not kept.take():
        host.give_back_unused(device)  # a prompt's memory
        return kept if kept.take() else None
    return kept


@functools.cache
def _say(why: str) -> None:
    _log.info("gemma4_compat: no experts stay on the card: %s", why)


def give_back(model: Any) -> None:
    """Give back the memory of experts that are kept for a model."""
    if decoder.is_preferred(model):
        decoder.of(model).give_back_experts()


def number(
    decoding: decoder.Decoding, model: Any, rows: int, found: list[expert_lookup.ExpertLookup], *, unused: bool = True
) -> int:
    """How many slots each of these lookups may have, beside steps of so many rows.

    ``unused``: also in memory that PyTorch has and does not use.
    """
    import torch

    text, experts = model.config.get_text_config(), int(found[0].module.num_experts)
    most = min(experts, expert_slots.MOST)
    left = host.free_memory(model.device, decoding.prompts.nbytes if unused else sys.maxsize)
    if left is None:
        return most
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(model.device)
    if fraction < 1:  # PyTorch may not allocate more, and would not know of this memory
        total = torch.cuda.get_device_properties(model.device).total_memory
        left = min(left, int(fraction * total) - torch.cuda.memory_allocated(model.device) - decoding.prompts.nbytes)
    chosen = 3 * rows * text.top_k_experts * text.moe_intermediate_size * text.hidden_size * model.dtype.itemsize
    each = sum(_size(lookup, experts) for lookup in found) // experts
    return min(most, use.room_for_experts(left - 2 * chosen) // each)  # dequantized in a graph, and without one


def _lookups(model: Any) -> list[expert_lookup.ExpertLookup]:
    """Those of layers whose experts are in host memory, as they are now."""
    groups = (group for streamer in streaming.streamers(model) for group in streamer.groups())
    found = [
        group.lookup()
        for group in groups
        if group.experts is not None and not group.on_disk and group.device == model.device and not group.is_stale()
    ]
    return [one for one in found if one is not None]


def _tensors(lookup: expert_lookup.ExpertLookup) -> list[Any]:
    """Those with a row for each expert."""
    states = [(weight, vars(weight).get("quant_state")) for weight in lookup.weights.values()]
    tensors = [one for weight, state in states for one in (weight, *(quant_states.tensors(state) if state else ()))]
    return [tensor for tensor in tensors if expert_lookup.per_expert(tensor)]


def _size(lookup: expert_lookup.ExpertLookup, slots: int) -> int:
    """Bytes of so many slots."""
    return sum(_aligned(tensor.nbytes // lookup.module.num_experts * slots) for tensor in _tensors(lookup))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _in_slots(weight: Any, views: Mapping[int, Any], number: int) -> Any:
    """A weight of the experts in slots; ``views``: of its tensors, by the id of what they stand for."""
    import torch

    state, data = vars(weight).get("quant_state"), views[id(weight)]
    if state is None:
        return data
    own = quant_states.with_tensors(state, {id(one): views.get(id(one), one) for one in quant_states.tensors(state)})
    own.shape = torch.Size((number, *state.shape[1:]))
    return expert_storage.with_state(data, own)
