"""What one accelerator uses: weights that stay, buffers of what is streamed, and what computing takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from gemma4_compat._planner import cost
from gemma4_compat._planner.blueprint import Block, Blueprint, Size
from gemma4_compat._planner.cost import COSTS, Load


@dataclass(frozen=True, kw_only=True)
class Use:
    """Bytes on one accelerator.

    Attributes:
        weights: what stays there.
        pages: buffers for the streamed layers.
        adapter: LoRA weights, those of streamed layers included.
        kv: KV cache at the end of the context.
        graph: memory pool of the graphs of fast decoding, in ``prefill`` and ``decode``; 0 without them.
        loading: peak in ``from_pretrained``.
        prefill: peak of the first forward, towers included.
        decode: peak while decoding, at the end of the context.
        budget: what it may use.
    """

    weights: int
    pages: int
    adapter: int
    kv: int
    loading: int
    prefill: int
    decode: int
    budget: int
    graph: int = 0

    @property
    def peak(self) -> int:
        """The largest of the three."""
        return max(self.loading, self.prefill, self.decode)


def use_of(
    blueprint: Blueprint,
    resident: Collection[Block],
    paged: Collection[Block],
    evicted: Collection[Block],
    load: Load,
    *,
    budget: int,
    main: bool,
    quantize_offloaded: bool,
    apart: Collection[str] = (),
) -> Use:
    """What one accelerator uses: blocks that stay, layers that pass through, and (the main one) blocks elsewhere.

    ``apart`` are the names of blocks that stay, but for their experts.
    """
    looked_up = [block for block in resident if block.name in apart]
    resident = [block.without_experts() if block in looked_up else block for block in resident]
    weights = sum(block.stored.allocated for block in resident)
    # A prompt needs all experts of a layer at once, a token those that it hits.
    whole = [size_of(block, quantize_offloaded).allocated for block in paged]
    pages = _slots([*whole, *(_experts(block, quantize_offloaded) for block in looked_up)])
    parts = [size - _experts(block, quantize_offloaded) for size, block in zip(whole, paged)]
    number, taken, _ = blueprint.experts or (0, 0, 0)
    few = load.batch * taken < number and load.training is None
    streamed = parts if few else whole
    adapter = sum(block.adapter for block in (*resident, *paged, *evicted))
    layers = [block for block in (*resident, *paged) if block.kind == "layer"]
    if paged and not quantize_offloaded:  # computed as they are: no dequantized copy
        layers = [replace(block, workspace=0, experts=0) if block in paged else block for block in layers]
    if looked_up and not quantize_offloaded:
        layers = [replace(block, experts=0) if block.name in apart else block for block in layers]
    kv = sum(cost.kv_cache(block, load, blueprint.item, prefill=False) for block in layers)
    graph = cost.graph(blueprint, layers, streamed, load, head=main)
    held = weights + adapter + graph + (0 if load.weights_only else COSTS.blas_workspace)
    loading = weights + max((block.loading for block in resident), default=0)
    if load.training is not None:
        step = _with_slack(held + pages + load.training, load)
        return Use(
            weights=weights, pages=pages, adapter=0, kv=0, loading=loading, prefill=step, decode=step, budget=budget
        )
    prefill = cost.activations(blueprint, layers, load, prefill=True, head=main)
    decode = cost.activations(blueprint, layers, load, prefill=False, head=main)
    if few and not load.weights_only:  # rows of unquantized experts; those of quantized ones are in cost.activations
        away = [block for block in (*paged, *looked_up) if not block.experts or not quantize_offloaded]
        rows = [_experts(block, quantize_offloaded) for block in away]
        decode += max(rows, default=0) * load.batch * taken // number
    if main:
        towers = [block for block in evicted if block.kind == "tower" and getattr(load, block.modality or "")]
        brought_in = max((2 * size_of(block, quantize_offloaded).leaf for block in towers), default=0)
        prefill = max(prefill, brought_in + cost.tower_activations(blueprint, load))
    return Use(
        weights=weights,
        pages=pages,
        adapter=adapter,
        kv=kv,
        loading=loading,
        prefill=_with_slack(held + pages + prefill, load),
        decode=_with_slack(held + _slots(streamed) + decode, load),
        budget=budget,
        graph=graph,
    )


def _with_slack(nbytes: int, load: Load) -> int:
    return nbytes + (0 if load.weights_only else int(nbytes * COSTS.slack))


def size_of(block: Block, quantize_offloaded: bool) -> Size:
    """Of a block that is offloaded."""
    return block.stored if quantize_offloaded else block.plain


def experts_of(block: Block, quantize_offloaded: bool) -> Size:
    """Of the experts in a block, where they are offloaded; nothing for a block without any."""
    size = block.experts_stored if quantize_offloaded else block.experts_plain
    return Size(nbytes=0, allocated=0, leaf=0) if size is None else size


def _experts(block: Block, quantize_offloaded: bool) -> int:
    return experts_of(block, quantize_offloaded).allocated


def _slots(sizes: Sequence[int]) -> int:
    """The buffers on the accelerator for streamed layers of these sizes."""
    return max(sizes, default=0) * min(COSTS.slots, len(sizes))
