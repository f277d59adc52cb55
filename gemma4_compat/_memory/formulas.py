"""How many bytes computing a model takes in addition to its weights: the KV cache and the temporaries of a forward.

Arithmetic over a :class:`~gemma4_compat._memory.blueprint.Blueprint`. :data:`MEASURED` holds the few numbers that are
measured, not derived.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gemma4_compat._kernels.specs import flash
from gemma4_compat._memory.blueprint import Attention, Block, Blueprint, rounded


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured numbers that :func:`activations` uses, in one place.

    Attributes:
        blas_workspace: what cuBLAS keeps (32 MiB on Hopper, 8 MiB before it).
        slots: buffers on the accelerator for streamed layers in a forward.
        norm: bytes per element while an RMSNorm runs: its fp32 copy and one more.
        per_layer_inputs: bytes per element of the per-layer inputs while they are projected, normalized and added:
            the looked-up rows and the projection in bf16, two fp32 copies.
        eager_scores: bytes per element of attention scores with eager attention: bf16, masked, fp32, bf16 again.
        logits: bytes per element of the last position's logits: bf16, its soft-capped copies, ``generate``'s fp32 one.
        image_tokens: soft tokens of one image.
        audio_frames: mel frames of one audio input (30 s).
        slack: what fragmentation and small temporaries take, as a share of everything else.
        graph_pool: bytes in a graph's memory pool per byte of temporaries that a step uses at its peak. 1 is what an
            allocator without fragmentation needs; not measured yet.
        graph_slots: buffers for streamed layers in that pool, in addition to the ``slots`` of eager forwards.
        graphs: the most graphs that a generation needs, with one pool for all: one while the sliding windows fill up,
            one when they are full. Each keeps its logits.
    """

    blas_workspace: int = 32 << 20
    slots: int = 2
    norm: int = 8
    per_layer_inputs: int = 12
    eager_scores: int = 10
    logits: int = 14
    image_tokens: int = 280
    audio_frames: int = 3000
    slack: float = 0.01
    graph_pool: float = 1.0
    graph_slots: int = 2
    graphs: int = 2


MEASURED = Measured()


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the model has to generate.

    Attributes:
        context: tokens per sequence, prompt and answer together.
        batch: sequences at a time.
        prompt: tokens of the prompt; None is the worst case, the whole context.
        prefill_chunk: tokens of the prompt in one forward (``prefill_chunk_size`` of ``generate``); None: all.
        vision: whether inputs have images (one per sequence).
        audio: whether inputs have audio (30 s per sequence).
        attention: "sdpa" or "eager".
        assistant: bytes of the weights of an assistant that drafts; 0: none does.
        drafts: bytes that graphs of its speculative steps keep; 0: with ``fast``, texts are decoded without them.
        fast: decode with ``gemma4_compat.decode_fast``: a static cache, and a step replayed as a CUDA graph.
        own_attention: with ``fast``, kernels of this package compute the attention of prompts that has a mask, without
            copies, where the cache is long enough (``flash.POSITIONS``). They serve its heads.
        own_in_chunks: the same, where the prompt is read in chunks.
        head_away: with ``fast``, the head and the embedding tied to it may be in host memory.
        weights_only: reserve nothing for the KV cache and the temporaries, like upstream's maps.
    """

    context: int = 4096
    batch: int = 1
    prompt: int | None = None
    prefill_chunk: int | None = None
    vision: bool = False
    audio: bool = False
    attention: str = "sdpa"
    assistant: int = 0
    drafts: int = 0
    fast: bool = False
    own_attention: bool = False
    own_in_chunks: bool = False
    head_away: bool = False
    weights_only: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens in the prompt of a sequence."""
        return self.context if self.prompt is None else min(self.prompt, self.context)

    @property
    def prefill(self) -> int:
        """Tokens per sequence in a forward that reads the prompt, or a chunk of it."""
        return self.prompt_tokens if self.prefill_chunk is None else min(self.prefill_chunk, self.prompt_tokens)

    @property
    def chunked(self) -> bool:
        """Whether the prompt takes several forwards."""
        return self.prefill < self.prompt_tokens

    def keys(self, window: int | None) -> int:
        """Tokens whose keys a layer has in the last forward of the prompt; ``window``: of sliding attention."""
        if window is None or not self.chunked:
            return self.prompt_tokens
        return min(self.prompt_tokens, window + self.prefill)


@dataclass(frozen=True, kw_only=True)
class TrainingLoad:
    """A training step.

    Attributes:
        step: bytes that it takes in addition to the weights of the base.
        replayed: its layers are: graphs read the weights of streamed ones in memory of their own, one layer at a time.
    """

    step: int
    replayed: bool = False


def kv_cache(block: Block, load: Load, item: int, *, prefill: bool) -> int:
    """Bytes one decoder layer holds in transformers' ``DynamicCache``, or with ``load.fast`` in a ``StaticCache``.

    KV-shared layers hold nothing. A full layer holds the whole context. A sliding layer holds ``sliding_window``
    tokens while decoding. But after a prompt it keeps a *view* of the keys of the whole prompt, so in the prefill
    every layer holds the whole prompt until its next update. Layers with ``attention_k_eq_v``, which take values from
    keys, still hold both. A static cache has its final size from the beginning.
    """
    attention = block.attention
    if attention is None or attention.shared or load.weights_only:
        return 0
    tokens = load.context
    if prefill and not load.fast:
        tokens = load.keys(attention.window)
    elif attention.window is not None:
        tokens = min(tokens, attention.window)
    return 2 * rounded(load.batch * tokens * attention.kv_width * item)


def activations(blueprint: Blueprint, layers: Collection[Block], load: Load, *, prefill: bool, head: bool) -> int:
    """The largest sum of KV cache and temporaries while ``layers`` run on one accelerator, without the weights.

    With T tokens in the forward (batch x prompt, or batch while decoding), e bytes per element, W the width of the
    per-layer inputs of all layers together:

    - always alive: the embedded inputs and the residual stream (2 T hidden e), the per-layer inputs as looked up and
      as projected (2 T W e), rotary tables, the attention mask (prompt x prompt bytes if a layer needs one);
    - before the layers, and before a prompt has a cache: the per-layer inputs being projected
      (``MEASURED.per_layer_inputs`` T W);
    - then the KV cache (:func:`kv_cache`) and the largest of: a layer's attention; its MLP: gate, activation, up (3 T
      intermediate e); its experts; the logits of the last position (``MEASURED.logits`` batch vocabulary: ``generate``
      keeps no others);
    - attention: queries with their norm in fp32, keys and values repeated for every head if the kernel has no grouped
      heads, the output with its fp32 accumulator, the mask as numbers and a copy of them (:mod:`attention`),
      and all scores twice if the kernel is "math" (in fp32) or eager; or the copy of a ``DynamicCache`` that grows;
    - the dequantized bf16 copy of a layer's largest 4-bit weight, if the forward has more than one token, and of its
      quantized experts (while decoding: of those that are hit), and 8-bit's quantized inputs and int32 products;
    - LoRA: the layer's widest input and output in fp32.

    With a static cache (``load.fast``) a layer sees the whole cache, filled or not. A step always has masks, so keys
    and values are repeated unless one query needs no repetition, and no kernel is "math". The cache does not grow; a
    full window is written anew. After a prompt longer than the window, one sliding layer's keys and values of the
    whole prompt exist, for that layer or for the layers that share them.

    If transformers takes only the last position through the KV-shared layers of a prefill (5.23), they count as in
    decoding.
    """
    if load.weights_only:
        return 0
    tokens = load.batch * (load.prefill if prefill else 1)
    item = blueprint.item
    wide = blueprint.per_layer_width
    alive = tokens * item * 2 * (blueprint.hidden + wide)
    if prefill and layers:
        alive += 2 * item * load.prefill * sum({block.attention.head_dim for block in layers if block.attention})
        alive += _prompt_in_static_cache(layers, load, item)
    if prefill or load.fast:
        alive += _masks(blueprint, layers, load, prefill=prefill)
    cache = sum(kv_cache(block, load, item, prefill=prefill) for block in layers)
    stages = [MEASURED.norm * tokens * blueprint.hidden]
    stages += [_layer(blueprint, block, load, prefill=prefill) for block in layers]
    first = 0
    if head:
        stages.append(MEASURED.logits * load.batch * blueprint.vocabulary)
        # Before a prompt the cache is empty, but a static one may be left from the previous generation.
        empty = prefill and not load.fast and not load.chunked
        first = (MEASURED.per_layer_inputs - 2 * item) * tokens * wide + (0 if empty else cache)
    return alive + max(first, cache + max(stages))


def graph(
    blueprint: Blueprint, layers: Collection[Block], streamed: Collection[int], load: Load, *, head: bool
) -> int:
    """Bytes of the memory pool of the graphs that fast decoding replays on one accelerator; 0 without ``load.fast``.

    Nothing else can use a pool's memory as long as its graphs live, which is from one generation to the next: all of
    it counts in ``torch.cuda.memory_reserved``, but only what is read after a replay in ``memory_allocated``. It has

    - the temporaries of one step, which :func:`activations` counts without the KV cache: the graphs are replayed one
      after another, so the largest is enough (times ``MEASURED.graph_pool``);
    - slots for streamed layers, as large as the largest, in addition to those of eager forwards
      (``MEASURED.graph_slots``);
    - what cuBLAS keeps for the stream of the capture (``MEASURED.blas_workspace``: one per stream);
    - the logits of each graph (``MEASURED.graphs`` batch vocabulary e), which are read after the replay.

    Args:
        blueprint: from :func:`gemma4_compat._memory.blueprint.describe`.
        layers: those computed there.
        streamed: the streamed bytes of each.
        load: what the model has to compute.
        head: whether the logits are computed there.
    """
    if not load.fast or load.weights_only:
        return 0
    cache = sum(kv_cache(block, load, blueprint.item, prefill=False) for block in layers)
    step = activations(blueprint, layers, load, prefill=False, head=head) - cache
    slots = max(streamed, default=0) * min(MEASURED.graph_slots, len(streamed))
    logits = rounded(load.batch * blueprint.vocabulary * blueprint.item) if head else 0
    return int(MEASURED.graph_pool * step) + slots + MEASURED.blas_workspace + MEASURED.graphs * logits


def draft_rows(slots: int) -> int:
    """Rows of a sliding layer of so many positions, for speculative steps: rejected drafts are overwritten there."""
    return slots + max(64, slots // 4)


def draft_windows(layers: Collection[Block], load: Load, item: int) -> int:
    """Bytes of the rows that sliding layers have a second time, for drafts."""
    found = 0
    for block in layers:
        attention = block.attention
        if attention is not None and attention.window is not None and not attention.shared:
            rows = draft_rows(min(load.context, attention.window))
            found += 2 * rounded(rows * attention.kv_width * item)
    return found


def assistant(layers: Collection[Block], load: Load, item: int) -> int:
    """Bytes on the accelerator that an assistant adds; 0 unless one drafts."""
    return load.assistant + (load.drafts + draft_windows(layers, load, item) if load.fast and load.drafts else 0)


def is_own(load: Load) -> bool:
    """Whether kernels of this package may compute attention of a load's prompts."""
    counted = load.own_attention or (load.own_in_chunks and load.chunked)
    return counted and load.fast and load.attention == "sdpa" and load.context >= flash.POSITIONS


def _masks(blueprint: Blueprint, layers: Collection[Block], load: Load, *, prefill: bool) -> int:
    """Masks of one byte per pair with SDPA, bf16 with eager attention; one for all layers of a kind."""
    size = 2 if load.attention == "eager" else 1
    attentions = {block.attention.window: block.attention for block in layers if block.attention}.values()
    masked = [attention for attention in attentions if _is_masked(blueprint, attention, load, prefill=prefill)]
    rows = load.prefill if prefill else 1
    return sum(load.batch * rows * _seen(attention, load, prefill=prefill) * size for attention in masked)


def _is_masked(blueprint: Blueprint, attention: Attention, load: Load, *, prefill: bool) -> bool:
    """Whether there is a mask, without padding: SDPA needs none while the prompt fits the window."""
    if load.attention == "eager":
        return True
    if not load.fast:
        return prefill and (load.chunked or (attention.window is not None and load.prefill > attention.window))
    # One query of a static cache always has a mask, and so have chunks after the first; a prompt that is read at once
    # has one for windows that such a cache can fill.
    fills = attention.window is not None and load.context >= attention.window
    return fills or not prefill or load.chunked or blueprint.static_masks


def _seen(attention: Attention, load: Load, *, prefill: bool) -> int:
    """Tokens whose keys a layer's kernel gets."""
    window = load.context if attention.window is None else attention.window
    if prefill and (not load.fast or load.prompt_tokens > window):
        return load.keys(attention.window)
    return min(load.context, window)


def _prompt_in_static_cache(layers: Collection[Block], load: Load, item: int) -> int:
    """A static cache copies a window of the prompt; the layer itself, and those that share with it, see all of it."""
    sizes = [
        block.attention.kv_heads * block.attention.head_dim * load.keys(block.attention.window)
        for block in layers
        if block.attention and block.attention.window is not None and load.prompt_tokens > block.attention.window
    ]
    return 2 * load.batch * max(sizes, default=0) * item if load.fast else 0


def _layer(blueprint: Blueprint, block: Block, load: Load, *, prefill: bool) -> int:
    attention = block.attention
    assert attention is not None  # a decoder layer
    # With SDPA a single position of a prompt needs a mask, which a static cache may lack.
    one_query = blueprint.one_query and (load.attention == "eager" or not load.fast)
    rows = load.prefill if prefill and not (attention.shared and one_query) else 1
    tokens = load.batch * rows
    item, hidden = blueprint.item, blueprint.hidden
    width = attention.heads * attention.head_dim
    residual = 2 * tokens * hidden * item  # the stream, and its norm's output
    kernel = _kernel(blueprint, attention, load, rows, prefill=prefill)
    if not prefill and not load.fast:  # while a layer's cache grows, the old and the new one both exist
        kernel += kv_cache(block, load, item, prefill=False)
    elif not load.fast and load.chunked:  # keys are copied before values are
        grown = kv_cache(block, load, item, prefill=True) // 2
        kernel = max(kernel, tokens * (width + 2 * attention.kv_width) * item + grown)
    elif not prefill and attention.window is not None and load.context > attention.window:
        kernel = max(kernel, tokens * width * item + kv_cache(block, load, item, prefill=False))
    # Attention comes before the layer has added to the stream.
    attends = max(tokens * width * (item + MEASURED.norm), kernel) - tokens * hidden * item
    mlp = 3 * tokens * block.intermediate * item
    many = tokens > 1
    workspace = block.workspace if many else 0
    if blueprint.quantization == "8bit":
        workspace = tokens * (3 * max(block.intermediate, width) + 6 * max(block.intermediate, width))
    experts = 0
    if blueprint.experts is not None:
        number, used, inner = blueprint.experts
        pairs = tokens * used
        looped = pairs * (8 * (number + 1) + item * (2 * inner + hidden))  # one expert at a time
        experts = max(looped, grouped_experts(pairs, hidden, item)) + 2 * residual
        if block.experts and tokens * used < number:  # the experts that are hit, and their packed bytes
            experts += block.experts * tokens * used // number * 5 // 4
        else:
            experts += block.experts
    lora = tokens * 4 * (block.intermediate + hidden) if block.adapter else 0
    return residual + workspace + lora + max(attends, mlp, experts, MEASURED.norm * tokens * hidden)


def grouped_experts(pairs: int, hidden: int, item: int) -> int:
    """Temporaries of experts that are computed at once (``grouped_mm``), for so many pairs of token and expert: their
    inputs and outputs, and the outputs in fp32, weighted and in token order.
    """
    return pairs * hidden * (2 * item + 2 * 4)


def repeated(keys: int, heads: int, kv_heads: int, head_dim: int, item: int) -> int:
    """Bytes of keys and values of ``keys`` tokens. transformers copies them for each query head where there is a mask:
    no kernel has both a mask and grouped heads. One head is broadcast as a view.
    """
    return 2 * keys * heads * head_dim * item if 1 < kv_heads < heads else 0


def _kernel(blueprint: Blueprint, attention: Attention, load: Load, rows: int, *, prefill: bool) -> int:
    """Queries, output and the other temporaries of a layer's attention, for ``rows`` queries per sequence."""
    item = blueprint.item
    width = attention.heads * attention.head_dim
    queries = load.batch * rows * width
    seen = _seen(attention, load, prefill=prefill)
    keys = load.batch * seen * width  # for every head
    pairs = load.batch * rows * seen
    heads = attention.heads, attention.kv_heads, attention.head_dim
    own = prefill and rows > 1 and is_own(load) and _is_masked(blueprint, attention, load, prefill=True)
    if own and flash.reaches(*heads, tokens=rows, keys=seen, batch=load.batch):
        # While padding is hidden there are two masks, and the graph of a chunk keeps one.
        return 2 * queries * item + flash.workspace(load.batch, attention.heads, attention.head_dim) + pairs
    copies = repeated(load.batch * seen, *heads, item)
    if load.attention == "eager":
        return queries * item + copies + MEASURED.eager_scores * attention.heads * pairs
    kernel = queries * (2 * item + 4)  # in, out, and an accumulator
    masked = _is_masked(blueprint, attention, load, prefill=prefill)
    if masked:
        # A bool mask becomes numbers, which a GPU's memory-efficient kernel copies before the output is there. That
        # copy is inferred, not observed: for 131,072 tokens of an E2B in chunks of 512 and 1,024, plans with it are at
        # most 4 % below the higher peaks, plans without it 7 %
        # (benchmarks/results/2026-11-27-h100/contexts-before-E2B.json).
        numbers = pairs * item
        kernel = numbers + max(kernel, queries * item + numbers)
    if attention.head_dim > 256 and blueprint.math_attention and not masked:
        kernel += 2 * keys * (item + 4) + 2 * 4 * attention.heads * pairs
    elif masked:
        kernel += 0 if rows == 1 and blueprint.one_query_packed else copies
    elif rows > 1 and (attention.head_dim > 256 or seen > (attention.window or seen)):
        kernel += copies
    return kernel


def tower_activations(blueprint: Blueprint, load: Load) -> int:
    """The largest sum of temporaries while a tower runs, for one image and 30 s of audio per sequence.

    Vision: patches x (the residual stream, its fp32 norm and three times the MLP), the mask, the one-hot position
    matrix of transformers < 5.10 (int64 and bf16), and scores with eager attention. Audio: three copies of the first
    convolution's output (a quarter of the mel frames x 128 bins x channels), which is larger than any layer.
    """
    if load.weights_only:
        return 0
    item = blueprint.item
    stages = [0]
    if load.vision and blueprint.vision is not None:
        hidden, inner, heads, positions = blueprint.vision
        each = MEASURED.image_tokens * blueprint.patches
        patches = load.batch * each
        scores = MEASURED.eager_scores * load.batch * heads * each**2 if load.attention == "eager" else 0
        layer = patches * hidden * (3 * item + MEASURED.norm) + load.batch * each**2
        layer += max(3 * patches * inner * item, scores)
        stages += [layer, patches * 2 * positions * (8 + item) if blueprint.one_hot_positions else 0]
    elif load.vision:  # one projection of raw patches
        stages.append(load.batch * MEASURED.image_tokens * 48 * 48 * 3 * (item + MEASURED.norm))
    if load.audio and blueprint.audio is not None:
        _, channels = blueprint.audio
        stages.append(3 * load.batch * (MEASURED.audio_frames // 2) * 64 * channels * item)
    return max(stages)
