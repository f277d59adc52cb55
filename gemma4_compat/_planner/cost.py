"""How many bytes computing a model takes, beside its weights: the KV cache and the temporaries of a forward.

Arithmetic over a :class:`~gemma4_compat._planner.blueprint.Blueprint`. :data:`COSTS` holds the few numbers that are
measured, not derived.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gemma4_compat._planner.blueprint import Block, Blueprint, rounded


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Numbers of the model of :func:`activations` that come from measurements, in one place.

    Attributes:
        blas_workspace: what cuBLAS keeps (32 MiB on Hopper, 8 MiB before it).
        slots: buffers that streamed layers have on the accelerator in a forward.
        norm: bytes an element while an RMSNorm runs: its fp32 copy and one more.
        per_layer_inputs: bytes an element of the per-layer inputs while they are projected, normalized and added:
            the looked-up rows and the projection in bf16, two fp32 copies.
        eager_scores: bytes an element of attention scores with eager attention: bf16, masked, fp32, bf16 again.
        logits: bytes an element of the last position's logits: bf16, its soft-capped copies, ``generate``'s fp32 one.
        image_tokens: soft tokens of one image.
        audio_frames: mel frames of one audio input (30 s).
        slack: share of everything else that fragmentation and small temporaries take.
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


COSTS = Costs()


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the model has to compute.

    Attributes:
        context: tokens of a sequence, prompt and answer together.
        batch: sequences at a time.
        prompt: tokens of the prompt, which one forward takes in; None is the worst case, all of the context.
        vision: whether images are given (one a sequence).
        audio: whether audio is given (30 s a sequence).
        attention: "sdpa" or "eager".
        weights_only: keep no room for the KV cache and the temporaries, as upstream's maps keep none.
    """

    context: int = 4096
    batch: int = 1
    prompt: int | None = None
    vision: bool = False
    audio: bool = False
    attention: str = "sdpa"
    weights_only: bool = False

    @property
    def prefill(self) -> int:
        """Tokens of a sequence in the first forward."""
        return self.context if self.prompt is None else min(self.prompt, self.context)


def kv_cache(block: Block, load: Load, item: int, *, prefill: bool) -> int:
    """Bytes one decoder layer holds in transformers' ``DynamicCache``.

    KV-shared layers hold none. A full layer holds all of the context. A sliding layer holds ``sliding_window`` tokens
    while decoding; but what it keeps after a prompt is a *view* of the keys of the whole prompt, so in the prefill
    every layer holds all of it, until its next update. Layers with ``attention_k_eq_v``, which take values from
    keys, still hold both.
    """
    attention = block.attention
    if attention is None or attention.shared or load.weights_only:
        return 0
    tokens = load.context
    if prefill:
        tokens = load.prefill
    elif attention.window is not None:
        tokens = min(tokens, attention.window)
    return 2 * rounded(load.batch * tokens * attention.kv_width * item)


def activations(blueprint: Blueprint, layers: Collection[Block], load: Load, *, prefill: bool, head: bool) -> int:
    """The largest sum of KV cache and temporaries while ``layers`` run on one accelerator, beside the weights.

    With T tokens in the forward (batch x prompt, or batch while decoding), e bytes an element, W the width of the
    per-layer inputs of all layers together:

    - always alive: the embedded inputs and the residual stream (2 T hidden e), the per-layer inputs as looked up and
      as projected (2 T W e), rotary tables, the attention mask (prompt x prompt bytes where a layer needs one);
    - before the layers, and before a prefill has a cache: the per-layer inputs being projected
      (``COSTS.per_layer_inputs`` T W);
    - then the KV cache (:func:`kv_cache`) and one of, whichever is largest: a layer's attention; its MLP: gate,
      activation, up (3 T intermediate e); its experts; the logits of the last position (``COSTS.logits`` batch
      vocabulary: ``generate`` keeps no others);
    - attention: queries with their norm in fp32, keys and values repeated for every head where the kernel has no
      grouped heads, the output with its fp32 accumulator, and all scores twice where the kernel is "math" (in fp32)
      or eager;
    - the dequantized bf16 copy of a layer's largest 4-bit weight, where the forward has more than one token, of its
      quantized experts (while decoding: of those that are hit), and 8-bit's quantized inputs and int32 products;
    - LoRA: the layer's widest input and output in fp32.

    Where transformers takes only the last position through the KV-shared layers of a prefill (5.23), they count as in
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
        alive += _mask(layers, load)
    cache = sum(kv_cache(block, load, item, prefill=prefill) for block in layers)
    stages = [COSTS.norm * tokens * blueprint.hidden]
    stages += [_layer(blueprint, block, load, prefill=prefill) for block in layers]
    first = 0
    if head:
        stages.append(COSTS.logits * load.batch * blueprint.vocabulary)
        first = (COSTS.per_layer_inputs - 2 * item) * tokens * wide + (0 if prefill else cache)
    return alive + max(first, cache + max(stages))


def _mask(layers: Collection[Block], load: Load) -> int:
    """Masks of one byte a pair with SDPA (none while the prompt fits the window), bf16 with eager attention."""
    eager = load.attention == "eager"
    windows = {block.attention.window for block in layers if block.attention}
    masks = sum(1 for window in windows if eager or (window is not None and load.prefill > window))
    return int(masks * load.batch * load.prefill**2 * (2 if eager else 1))


def _layer(blueprint: Blueprint, block: Block, load: Load, *, prefill: bool) -> int:
    attention = block.attention
    assert attention is not None  # a decoder layer
    rows = load.prefill if prefill and not (attention.shared and blueprint.one_query) else 1
    tokens = load.batch * rows
    item, hidden = blueprint.item, blueprint.hidden
    width = attention.heads * attention.head_dim
    residual = 2 * tokens * hidden * item  # the stream, and what a norm made of it
    seen = load.prefill if prefill else load.context
    if attention.window is not None and not prefill:
        seen = min(seen, attention.window)
    keys = load.batch * seen * width  # of every head
    scores = load.batch * attention.heads * rows * seen
    kernel = tokens * width * item  # queries
    repeated = 1 < attention.kv_heads < attention.heads  # one head is shown to all as a view
    if load.attention == "eager":
        kernel += (2 * keys * item if repeated else 0) + COSTS.eager_scores * scores
    else:
        kernel += tokens * width * (item + 4)  # output, accumulator
        if attention.head_dim > 256 and blueprint.math_attention:
            kernel += 2 * keys * (item + 4) + 2 * 4 * scores
        elif repeated and rows > 1 and (attention.head_dim > 256 or seen > (attention.window or seen)):
            kernel += 2 * keys * item
    if not prefill:  # a layer's old and new cache are both there while it grows
        kernel += kv_cache(block, load, item, prefill=False)
    projected = tokens * width * (item + COSTS.norm)
    mlp = 3 * tokens * block.intermediate * item
    many = tokens > 1
    workspace = block.workspace if many else 0
    if blueprint.quantization == "8bit":
        workspace = tokens * (3 * max(block.intermediate, width) + 6 * max(block.intermediate, width))
    experts = 0
    if blueprint.experts is not None:
        number, used, inner = blueprint.experts
        experts = tokens * used * (8 * (number + 1) + item * (2 * inner + hidden)) + 2 * residual
        if block.experts and tokens * used < number:  # those that are hit, and their packed bytes
            experts += block.experts * tokens * used // number * 5 // 4
        else:
            experts += block.experts
    lora = tokens * 4 * (block.intermediate + hidden) if block.adapter else 0
    return residual + workspace + lora + max(projected, kernel, mlp, experts, COSTS.norm * tokens * hidden)


def tower_activations(blueprint: Blueprint, load: Load) -> int:
    """The largest sum of temporaries while a tower runs, for one image and 30 s of audio a sequence.

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
        each = COSTS.image_tokens * blueprint.patches
        patches = load.batch * each
        scores = COSTS.eager_scores * load.batch * heads * each**2 if load.attention == "eager" else 0
        layer = patches * hidden * (3 * item + COSTS.norm) + load.batch * each**2
        layer += max(3 * patches * inner * item, scores)
        stages += [layer, patches * 2 * positions * (8 + item) if blueprint.one_hot_positions else 0]
    elif load.vision:  # one projection of raw patches
        stages.append(load.batch * COSTS.image_tokens * 48 * 48 * 3 * (item + COSTS.norm))
    if load.audio and blueprint.audio is not None:
        _, channels = blueprint.audio
        stages.append(3 * load.batch * (COSTS.audio_frames // 2) * 64 * channels * item)
    return max(stages)
