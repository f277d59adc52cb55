"""Which block of a Gemma 4 goes where, so that everything a load needs fits into the memory there is.

Eviction is an ordered list of choices, each of which needs less accelerator memory than the one before: everything on
the accelerator; the per-layer embeddings in host memory (rows are looked up there, which costs nothing); the towers as
well, unused ones first; then, where fast decoding reads a copy of it in 8 bits, the head and the embedding tied to it;
then the experts of as few decoder layers as needed (each token fetches only the experts it is routed to); then as few
streamed decoder layers as needed. The first choice that fits is taken: more memory never streams more layers. Streamed
layers are copied to the accelerator while the layers before them compute.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gemma4_compat._engine.io.text import size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._memory.blueprint import Block, Blueprint
from gemma4_compat._memory.formulas import MEASURED, Load, TrainingLoad
from gemma4_compat._memory.use import Share, Use, head_copy, use_of

#: Fewer streamed layers than this free nothing: their buffers take the room of :attr:`Measured.slots` layers.
_FEWEST_STREAMED = MEASURED.slots + 1
#: What leaves host memory first.
_LEAVES_MEMORY = ("per_layer_embedding", "embedding", "tower", "head")
#: Suggested tokens per chunk of a prompt. For the 26B-A4B, chunks of 512 took twice the time and saved another 0.16
#: GiB (benchmarks/results/2026-11-24-h200-experts-short).
PREFILL_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A placement and the memory it takes.

    Attributes:
        device_map: for ``from_pretrained``; keys cover every tensor once, except that the experts of a layer that
            stays may have a key inside the layer's key. Its first accelerator computes what is offloaded.
        use: by accelerator.
        cpu: bytes in host memory, including padding of streamed layers.
        disk: bytes on disk.
        streamed: names of the streamed decoder layers.
        looked_up: names of the decoder layers that stay without their experts.
        brought: bytes that each step copies over the bus: streamed layers, and the experts that it hits.
        awaited: the part of them that a layer waits for: the experts of layers that stay.
    """

    device_map: dict[str, int | str]
    use: dict[int | str, Use]
    cpu: int
    disk: int
    streamed: tuple[str, ...]
    looked_up: tuple[str, ...] = ()
    brought: int = 0
    awaited: int = 0

    @property
    def offloads(self) -> bool:
        """Whether anything leaves the accelerators."""
        return any(device not in self.use for device in self.device_map.values())


@dataclass(frozen=True)
class _Choice:
    """The blocks that leave the accelerator, how many decoder layers' experts do, and how many layers are streamed."""

    evicted: frozenset[str]
    streamed: int
    experts: int = 0


_Budgets = Mapping[int | str, int] | Mapping[int, int]


def layout(
    blueprint: Blueprint,
    budgets: _Budgets,
    load: Load | TrainingLoad | None = None,
    *,
    cpu: int | None = None,
    disk: int | None = None,
    balanced: bool = False,
) -> Layout:
    """Place a model.

    Args:
        blueprint: from :func:`gemma4_compat._memory.blueprint.describe`.
        budgets: bytes that may be allocated on each accelerator, by the value the map will have for it (0, "cuda:0").
        load: what has to be computed; default: :class:`Load`'s.
        cpu: bytes of host memory for what leaves the accelerators; None: as much as it takes.
        disk: the same for the disk.
        balanced: over several accelerators, about the same on each; otherwise the first ones are filled.

    Raises:
        Gemma4CompatError: it does not fit. The message says what would.
    """
    load = load or Load()
    check(budgets, load)
    if cpu is not None and isinstance(load, Load) and cpu < blueprint.vocabulary * blueprint.hidden * blueprint.item:
        load = replace(load, head_away=False)  # it is not read on a disk
    found = _first_that_fits(blueprint, budgets, load)
    if found is None:
        raise Gemma4CompatError(_refusal(blueprint, budgets, load))
    if balanced and len(budgets) > 1 and not (found.choice.streamed or found.choice.experts):
        found = _balance(found)
    return _stored(found, cpu=cpu, disk=disk)


def fits(blueprint: Blueprint, budgets: _Budgets, load: Load | TrainingLoad) -> bool:
    """Whether a placement fits these budgets; :func:`layout` then raises only for the host's memory or the disk."""
    check(budgets, load)
    return _first_that_fits(blueprint, budgets, load) is not None


def smallest_budget(
    blueprint: Blueprint, load: Load | TrainingLoad | None = None, *, layers_leave: bool = True
) -> int:
    """The smallest budget in bytes, on one accelerator, with which :func:`layout` succeeds.

    Args:
        blueprint: from :func:`gemma4_compat._memory.blueprint.describe`.
        load: default: :class:`Load`'s.
        layers_leave: whether decoder layers, or their experts, may leave the accelerator.
    """
    load = load or Load()
    choices = [one for one in _choices(blueprint, load) if layers_leave or not (one.streamed or one.experts)]
    return min(int(_Placement(blueprint, choice, {0: 1 << 62}, load).use[0].least) for choice in choices)


def longest_context(
    blueprint: Blueprint, budgets: _Budgets, load: Load, *, limit: int, placed: Layout | None = None
) -> int:
    """The longest context that fits, up to ``limit``; 0 if none fits.

    Args:
        blueprint: from :func:`gemma4_compat._memory.blueprint.describe`.
        budgets: as for :func:`layout`.
        load: everything except its context.
        limit: the longest context that the model supports.
        placed: keep this placement; otherwise layouts may change with the context.
    """

    def fits(context: int) -> bool:
        wanted = replace(load, context=context, prompt=None)
        if placed is None:
            return _first_that_fits(blueprint, budgets, wanted) is not None
        used = placed_use(blueprint, placed, wanted)
        return all(use.peak <= budgets[device] for device, use in used.items())  # type: ignore[index]

    return bisect.bisect_left(range(1, limit + 1), True, key=lambda context: not fits(context))


# ------------------------------------------------------------------------------------------------------------ choices


def _choices(blueprint: Blueprint, load: Load | TrainingLoad) -> Iterator[_Choice]:
    evicted: list[str] = []
    yield _Choice(frozenset(), 0)
    tied = {block.tied for block in blueprint.blocks}
    # An input embedding without a tied head is looked up in place, like the per-layer embeddings.
    for block in blueprint.blocks:
        if block.kind == "per_layer_embedding" or (block.kind == "embedding" and block.name not in tied):
            evicted.append(block.name)
            yield _Choice(frozenset(evicted), 0)
    used = {name for name in ("vision", "audio") if getattr(load, name, False)}
    towers = [block for block in blueprint.blocks if block.kind == "tower"]
    for block in sorted(towers, key=lambda block: (block.modality in used, -block.stored.allocated)):
        evicted.append(block.name)
        yield _Choice(frozenset(evicted), 0)
    pair = [block for block in blueprint.blocks if block.tied is not None or block.name in tied]
    share = Share(resident=(), evicted=pair)
    if pair and isinstance(load, Load) and load.head_away and head_copy(blueprint, share, load):
        evicted += [block.name for block in pair]
        yield _Choice(frozenset(evicted), 0)
    apart = sum(layer.experts_stored is not None for layer in blueprint.layers)
    for count in range(_FEWEST_STREAMED, apart + 1):
        yield _Choice(frozenset(evicted), 0, count)
    for count in range(_FEWEST_STREAMED, len(blueprint.layers) + 1):
        yield _Choice(frozenset(evicted), count, apart)


def _spread(layers: Sequence[Block], count: int) -> list[Block]:
    """The ``count`` largest layers, evenly spaced among equals: a copy hides behind the layers between."""
    chosen: list[Block] = []
    by_size: dict[int, list[Block]] = {}
    for layer in layers:
        by_size.setdefault(layer.away.allocated, []).append(layer)
    for size in sorted(by_size, reverse=True):
        equal = by_size[size]
        wanted = min(count - len(chosen), len(equal))
        chosen += [equal[index * len(equal) // wanted] for index in range(wanted)]
    names = {layer.name for layer in chosen}
    return [layer for layer in layers if layer.name in names]


# ---------------------------------------------------------------------------------------------------------- placements


class _Placement:
    """Where a choice puts every block, and what each accelerator then uses. Its ``use`` may exceed the budgets."""

    def __init__(
        self,
        blueprint: Blueprint,
        choice: _Choice,
        budgets: Mapping[Any, int],
        load: Load | TrainingLoad,
        main: Any = None,
    ) -> None:
        self.blueprint, self.choice, self.budgets, self.load = blueprint, choice, budgets, load
        self.main = next(iter(budgets)) if main is None else main
        self.streamed: list[Block] = []
        self.looked_up: list[Block] = []
        self.on: dict[Any, list[Block]] = {device: [] for device in budgets}
        self.evicted = [block for block in blueprint.blocks if block.name in choice.evicted]
        self.on[self.main] = [
            block for block in blueprint.blocks if block.name not in choice.evicted and block.kind != "layer"
        ]
        self._place_layers(list(blueprint.layers))
        self.use: dict[Any, Use] = {
            device: self._use(device, blocks) for device, blocks in self.on.items() if blocks or device == self.main
        }

    @property
    def fits(self) -> bool:
        return all(use.peak <= use.budget for use in self.use.values())

    def _place_layers(self, layers: list[Block]) -> None:
        others = [device for device in self.budgets if device != self.main]
        if not self.choice.streamed and not self.choice.experts:
            # Fill the accelerators in order; the rest goes to the last, which then does not fit.
            for device in (self.main, *others):
                while layers and self._holds(device, [*self.on[device], layers[0]]):
                    self.on[device].append(layers.pop(0))
            self.on[(self.main, *others)[-1]] += layers
            return
        # The main accelerator computes streamed layers: the others take as much of the end of the model as they can.
        for device in reversed(others):
            while layers and self._holds(device, [layers[-1], *self.on[device]]):
                self.on[device].insert(0, layers.pop())
        self.streamed = _spread(layers, min(self.choice.streamed, len(layers)))
        names = {layer.name for layer in self.streamed}
        stay = [layer for layer in layers if layer.name not in names]
        apart = [layer for layer in stay if layer.experts_stored is not None]
        self.looked_up = _spread(apart, min(self.choice.experts, len(apart)))
        self.on[self.main] += stay

    def _holds(self, device: Any, blocks: list[Block]) -> bool:
        return bool(self._use(device, blocks).peak <= self.budgets[device])

    def _use(self, device: Any, resident: list[Block]) -> Use:
        if device == self.main:
            share = Share(resident=resident, looked_up=self.looked_up, streamed=self.streamed, evicted=self.evicted)
        else:
            share = Share(resident=resident, main=False)
        return use_of(self.blueprint, share, self.load, budget=self.budgets[device])


def placed_use(blueprint: Blueprint, placed: Layout, load: Load) -> dict[int | str, Use]:
    """What a layout uses under another load than the one it was made for."""
    main = next(iter(placed.use))
    away = [block for block in blueprint.blocks if placed.device_map[block.name] not in placed.use]
    found = {}
    for device, use in placed.use.items():
        resident = [block for block in blueprint.blocks if placed.device_map[block.name] == device]
        share = Share(resident=resident, main=False)
        if device == main:
            share = Share(
                resident=resident,
                looked_up=[block for block in resident if block.name in placed.looked_up],
                streamed=[block for block in away if block.kind == "layer"],
                evicted=[block for block in away if block.kind != "layer"],
            )
        found[device] = use_of(blueprint, share, load, budget=use.budget)
    return found


def _first_that_fits(blueprint: Blueprint, budgets: Mapping[Any, int], load: Load | TrainingLoad) -> _Placement | None:
    for choice in _choices(blueprint, load):
        for main in budgets:
            placement = _Placement(blueprint, choice, budgets, load, main)
            if placement.fits:
                return placement
    return None


def _balance(found: _Placement) -> _Placement:
    """The placement of the same choice that minimizes the use of its fullest accelerator, to 1 %."""
    low, high = 0, max(use.peak for use in found.use.values())
    best = found
    while high - low > max(high // 100, 1):
        cap = (low + high) // 2
        capped = {device: min(budget, cap) for device, budget in found.budgets.items()}
        trial = _Placement(found.blueprint, found.choice, capped, found.load, found.main)
        if trial.fits:
            best, high = trial, cap
        else:
            low = cap
    best.use = {device: replace(use, budget=found.budgets[device]) for device, use in best.use.items()}
    return best


def _stored(found: _Placement, *, cpu: int | None, disk: int | None) -> Layout:
    """Host memory for what left the accelerators; if that is short, the disk, per-layer embeddings first."""
    largest = max((block.away.allocated for block in found.streamed), default=0)
    away = sorted(found.evicted, key=lambda block: _LEAVES_MEMORY.index(block.kind))
    needs = {block.name: block.away.nbytes for block in away}
    needs |= {block.name: largest for block in reversed(found.streamed)}
    apart = {block.name: block for block in found.looked_up}
    needs |= {block.experts_name: block.experts_away.nbytes for block in reversed(found.looked_up)}
    if any(block.kind == "head" for block in away):  # it is read where it is, with the embedding, so both stay longest
        needs |= {block.name: needs.pop(block.name) for block in away if block.kind in ("embedding", "head")}
    on_disk: list[str] = []
    in_host = dict(needs)
    while cpu is not None and sum(in_host.values()) > cpu:
        name = next(iter(in_host))
        on_disk.append(name)
        del in_host[name]
    wanted = sum(needs[name] for name in on_disk)
    if disk is not None and wanted > disk:
        raise Gemma4CompatError(
            f"{size_text(sum(needs.values()))} of the model must leave the accelerator, and host memory "
            f"({size_text(cpu or 0)}) and disk ({size_text(disk)}) hold less: give {size_text(wanted - disk)} more of "
            "either"
        )
    where: dict[str, int | str] = dict.fromkeys(in_host, "cpu")
    where.update(dict.fromkeys(on_disk, "disk"))
    for device, blocks in found.on.items():
        where.update((block.name, device) for block in blocks)
    # The first accelerator of a map computes what is offloaded.
    main = {block.name for block in found.on[found.main]}
    names = sorted((block.name for block in found.blueprint.blocks), key=lambda name: name not in main)
    device_map: dict[str, int | str] = {}
    for name in names:
        device_map[name] = where[name]
        if name in apart:
            device_map[apart[name].experts_name] = where[apart[name].experts_name]
    ordered = {found.main: found.use[found.main]} | found.use
    return Layout(
        device_map=device_map,
        use=ordered,
        cpu=sum(in_host.values()),
        disk=wanted,
        streamed=tuple(block.name for block in found.streamed),
        looked_up=tuple(apart),
        brought=_brought(found, found.streamed) + _brought(found, found.looked_up),
        awaited=_brought(found, found.looked_up),
    )


def _brought(found: _Placement, layers: Sequence[Block]) -> int:
    """Bytes of these layers that a step copies over the bus; a training step copies all experts."""
    number, taken, _ = found.blueprint.experts or (1, 1, 0)
    hit = number if isinstance(found.load, TrainingLoad) else min(found.load.batch * taken, number)
    whole = (block for block in layers if block in found.streamed)
    rest = sum(block.away.nbytes - block.experts_away.nbytes for block in whole)
    return rest + sum(block.experts_away.nbytes * hit // number for block in layers)


def check(budgets: Mapping[Any, int], load: Load | TrainingLoad) -> None:
    """Refuse what no model can be placed for.

    Raises:
        Gemma4CompatError: a budget or a number is not positive, or the attention is unknown.
    """
    if not budgets:
        raise Gemma4CompatError("no accelerator was given: name at least one budget, such as {0: 8 * 2**30}")
    for device, budget in budgets.items():
        if budget <= 0:
            raise Gemma4CompatError(f"the budget of accelerator {device!r} is {budget} bytes; it must be positive")
    if isinstance(load, TrainingLoad):
        return
    optional = (name for name in ("prompt", "prefill_chunk") if getattr(load, name) is not None)
    for name in ("context", "batch", *optional):
        if getattr(load, name) < 1:
            raise Gemma4CompatError(f"{name} is {getattr(load, name)}; it must be at least 1")
    if load.attention not in ("sdpa", "eager"):
        raise Gemma4CompatError(f"attention {load.attention!r} is unknown; use 'sdpa' or 'eager'")


def _refusal(blueprint: Blueprint, budgets: Mapping[Any, int], load: Load | TrainingLoad) -> str:
    needed = smallest_budget(blueprint, load)
    given = ", ".join(size_text(budget) for budget in budgets.values())
    remedies = [f"{size_text(needed, up=True)} on one accelerator"]
    if isinstance(load, TrainingLoad):
        return f"a training step of {blueprint.model_class} does not fit into {given}: it takes {remedies[0]}"

    def fits(load: Load, blueprint: Blueprint = blueprint) -> bool:
        return _first_that_fits(blueprint, budgets, load) is not None

    context = longest_context(blueprint, budgets, load, limit=load.context)
    if context:
        remedies.append(f"a context of {context} tokens")
    chunked = replace(load, prefill_chunk=PREFILL_CHUNK)
    splits = chunked.prefill < load.prefill and not (load.vision or load.audio)
    if splits and fits(chunked):
        remedies.append(f"the prompt in chunks (prefill_chunk={PREFILL_CHUNK})")
    if load.batch > 1 and fits(replace(load, batch=1)):
        remedies.append("a batch of 1")
    if blueprint.quantization in (None, "8bit"):
        remedies.append("4-bit weights")
    elif (quantized := blueprint.offloading(quantized=True)) != blueprint and fits(load, quantized):
        remedies.append("offloaded layers quantized as well (gemma4_compat.quantize(offloaded=True))")
    experts = ""
    if blueprint.quantization != "8bit" and blueprint.experts and not any(layer.experts for layer in blueprint.layers):
        experts = " Its experts are in bf16 here; quantize_experts counts, and loads, them in 4 bits."
    read = f", read in chunks of {load.prefill_chunk} tokens," if load.chunked else ""
    return (
        f"{blueprint.model_class} with a context of {load.context}{read} and a batch of {load.batch} does not fit "
        f"into {given}, even with everything offloaded that can be. What would fit: {', or '.join(remedies)}.{experts}"
    )
