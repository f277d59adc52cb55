"""What one accelerator uses: weights that stay, buffers for streamed layers, and memory for computing."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from gemma4_compat._kernels.specs import flash, head, products
from gemma4_compat._memory import formulas
from gemma4_compat._memory.blueprint import Block, Blueprint
from gemma4_compat._memory.formulas import MEASURED, Load, TrainingLoad
from gemma4_compat._offload.transfer import row_lookup

#: Bytes that stay free where experts are kept: for graphs, and a longer text.
SPARE = 1 << 29


@dataclass(frozen=True, kw_only=True)
class Use:
    """Bytes on one accelerator while generating, or training.

    Attributes:
        weights: the ones that stay there.
        stream_buffers: buffers for the streamed layers.
        adapter: LoRA weights, including those of streamed layers; in training they belong to the step.
        kv: KV cache at the end of the context.
        graph: memory pool of the graphs of fast decoding, in ``prefill`` and ``decode``; 0 without them.
        assistant: what an assistant takes, in ``prefill`` and ``decode``: its weights, the rows that sliding layers
            have a second time, and what its graphs keep; 0 without one.
        head: the 8-bit copy of the head that fast decoding reads, in ``prefill`` and ``decode``; 0 where none is made,
            as where not as much again stays free.
        head_away: the head itself is in host memory: the copy has to fit.
        experts: those of host memory that fast decoding keeps, in ``decode``: as many of the last ones as a share of
            what is left has room for (:func:`room_for_experts`); 0 where it keeps none.
        loading: peak in ``from_pretrained``.
        prefill: peak of the first forward, including towers; or of a training step.
        decode: peak while decoding, at the end of the context.
        budget: what it may use.
    """

    weights: int
    stream_buffers: int
    loading: int
    prefill: int
    budget: int
    adapter: int = 0
    kv: int = 0
    decode: int = 0
    graph: int = 0
    assistant: int = 0
    head: int = 0
    head_away: bool = False
    experts: int = 0

    @property
    def peak(self) -> int:
        """The largest of the three."""
        return max(self.loading, self.prefill, self.decode)

    @property
    def least(self) -> int:
        """The same without copies of the head and of experts, which are made only if they fit."""
        optional = 0 if self.head_away else self.head
        return max(self.loading, self.prefill - optional, self.decode - optional - self.experts)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The blocks that one accelerator computes.

    Attributes:
        resident: the ones that stay there.
        looked_up: those of them whose experts are elsewhere.
        streamed: decoder layers that are streamed through it.
        evicted: other blocks that are elsewhere and computed with it.
        main: whether it computes the embeddings and the logits.
    """

    resident: Collection[Block]
    looked_up: Collection[Block] = ()
    streamed: Collection[Block] = ()
    evicted: Collection[Block] = ()
    main: bool = True

    @functools.cached_property
    def head_away(self) -> bool:
        """Whether the head is in host memory, where it is read."""
        return any(block.kind == "head" for block in self.evicted)

    @functools.cached_property
    def stays(self) -> list[Block]:
        """The part of ``resident`` that is on the accelerator."""
        apart = {block.name for block in self.looked_up}
        return [block.without_experts() if block.name in apart else block for block in self.resident]

    @functools.cached_property
    def computed(self) -> list[Block]:
        """The decoder layers as they are computed there."""
        layers = [block for block in self.stays if block.kind == "layer"]
        return layers + [block.brought_in() for block in self.streamed if block.kind == "layer"]

    @property
    def weights(self) -> int:
        """Bytes of those that stay."""
        return sum(block.stored.allocated for block in self.stays)

    @property
    def loading(self) -> int:
        """The peak while loading: while the last weight is quantized, it exists twice."""
        return self.weights + max((block.loading for block in self.stays), default=0)

    def stream_sizes(self, *, few: bool) -> list[int]:
        """Bytes of each streamed layer: a prompt needs all its experts at once, a token only the ``few`` it hits."""
        apart = (block.experts_away.allocated if few else 0 for block in self.streamed)
        return [block.away.allocated - experts for block, experts in zip(self.streamed, apart)]

    @property
    def brought(self) -> list[int]:
        """Bytes of each layer in a forward that needs all experts of a layer at once."""
        experts = (block.experts_away.allocated for block in self.looked_up)
        return [*(block.away.allocated for block in self.streamed), *experts]

    @property
    def stream_buffers(self) -> int:
        """The buffers of such a forward."""
        return slots(self.brought)


def use_of(blueprint: Blueprint, share: Share, load: Load | TrainingLoad, *, budget: int) -> Use:
    """What one accelerator uses for its share of the model."""
    weights, buffers = share.weights, share.stream_buffers
    if isinstance(load, TrainingLoad):
        buffers += max(share.brought, default=0) if load.replayed else 0
        step = _with_slack(weights + buffers + MEASURED.blas_workspace + load.step)
        return Use(weights=weights, stream_buffers=buffers, loading=share.loading, prefill=step, budget=budget)
    layers = share.computed
    number, taken, _ = blueprint.experts or (0, 0, 0)
    few = load.batch * taken < number  # a decoding step leaves experts of a layer unused
    streamed = share.stream_sizes(few=few)
    adapter = sum(block.adapter for block in (*share.resident, *share.streamed, *share.evicted))
    graph = formulas.graph(blueprint, layers, streamed, load, head=share.main)
    assistant = formulas.assistant(layers, load, blueprint.item) if share.main else 0
    held = weights + adapter + graph + assistant + (0 if load.weights_only else MEASURED.blas_workspace)
    held += _whole_head(blueprint, share, load)
    decode = formulas.activations(blueprint, layers, load, prefill=False, head=share.main)
    if few and not load.weights_only:
        decode += max(_rows(blueprint, share, load), default=0)
    slack = (lambda nbytes: nbytes) if load.weights_only else _with_slack
    found = Use(
        weights=weights,
        stream_buffers=buffers,
        adapter=adapter,
        kv=sum(formulas.kv_cache(block, load, blueprint.item, prefill=False) for block in layers),
        loading=share.loading,
        prefill=slack(held + max(reading(blueprint, share, one) for one in (load, *_shorter(load)))),
        decode=slack(held + slots(streamed) + decode),
        budget=budget,
        graph=graph,
        assistant=assistant,
    )
    copy = head_copy(blueprint, share, load)
    if copy and (share.head_away or max(found.prefill, found.decode + copy) + copy <= budget):
        copied = {"prefill": found.prefill + copy, "decode": found.decode + copy}
        found = replace(found, head=copy, head_away=share.head_away, **copied)
    kept = _kept_experts(blueprint, share, load, budget - found.decode) if few else 0
    return replace(found, experts=kept, decode=found.decode + kept)


def room_for_experts(left: int) -> int:
    """Bytes in which fast decoding keeps experts, of those that are left beside a step: three quarters, or fewer that
    leave :data:`SPARE`.
    """
    return left - max(left // 4, SPARE)


def _kept_experts(blueprint: Blueprint, share: Share, load: Load, left: int) -> int:
    """What experts of host memory take that fast decoding keeps, where it has so many bytes left."""
    away = sum(block.experts_away.allocated for block in (*share.looked_up, *share.streamed))
    if not away or blueprint.experts is None or not load.fast or load.weights_only:
        return 0
    number, taken, _ = blueprint.experts
    slots = min(number, room_for_experts(left) // (away // number))
    return away // number * slots if slots >= taken else 0


def head_copy(blueprint: Blueprint, share: Share, load: Load) -> int:
    """What the copy of the head takes where fast decoding may make one, of a 16-bit head here or in host memory."""
    most = row_lookup.MOST_ROWS if share.head_away else products.MAX_ROWS
    if not share.main or not load.fast or load.weights_only or load.assistant or load.batch > most:
        return 0
    words, inputs = blueprint.vocabulary, blueprint.hidden
    here = {block.name: block for block in (share.evicted if share.head_away else share.resident)}
    own = next((block for block in here.values() if block.kind == "head"), None)
    if own is None or own.adapter or own.stored != own.plain or (own.tied is not None and own.tied not in here):
        return 0
    return head.nbytes(words, inputs) if blueprint.item == 2 and words * inputs >= head.LEAST else 0


def _whole_head(blueprint: Blueprint, share: Share, load: Load) -> int:
    """What a head in host memory takes while it is computed, where it has more rows than are computed in place."""
    if not share.head_away or load.weights_only or load.batch <= row_lookup.MOST_ROWS:
        return 0
    return blueprint.vocabulary * blueprint.hidden * blueprint.item


def _shorter(load: Load) -> Iterator[Load]:
    """Shorter texts that may take more, because PyTorch computes their attention: their keys and values are few."""
    if formulas.is_own(load) and load.context < 4 * flash.POSITIONS:
        yield replace(load, context=flash.POSITIONS - 1)


def reading(blueprint: Blueprint, share: Share, load: Load) -> int:
    """Bytes of the first forward in addition to weights and graphs: cache, temporaries, towers, streaming buffers."""
    found = formulas.activations(blueprint, share.computed, load, prefill=True, head=share.main)
    if share.main:
        found = max(found, _towers(blueprint, share, load))
    return share.stream_buffers + found


def slots(sizes: Sequence[int]) -> int:
    """The buffers on the accelerator for streamed layers of these sizes."""
    return max(sizes, default=0) * min(MEASURED.slots, len(sizes))


def _rows(blueprint: Blueprint, share: Share, load: Load) -> Iterator[int]:
    """Bytes of the experts that a step copies, by layer, if they are not quantized.

    :func:`gemma4_compat._memory.formulas.activations` counts the quantized ones.
    """
    number, taken, _ = blueprint.experts or (1, 0, 0)
    for block in (*share.streamed, *share.looked_up):
        if not block.experts or not block.quantized_away:
            yield block.experts_away.allocated * load.batch * taken // number


def _towers(blueprint: Blueprint, share: Share, load: Load) -> int:
    """The peak of the towers; those elsewhere are onloaded one module after another."""
    used = (block for block in share.evicted if block.kind == "tower" and getattr(load, block.modality or ""))
    brought = max((2 * block.away.leaf for block in used), default=0)
    return brought + formulas.tower_activations(blueprint, load)


def _with_slack(nbytes: int) -> int:
    return nbytes + int(nbytes * MEASURED.slack)
