"""Prompts after ``decode_fast``: a forward of several tokens is captured by its exact shape, and replayed.

The first forward of a kind runs without a graph; the second is captured, if the cache has the memory of an earlier one
(or is in use already, as for the chunks of a long prompt). A replay has the bits of the forward without a graph.
The graph of a short one is captured again with fused kernels (:mod:`fused_steps`).
Graphs are kept apart from those of steps, in a memory pool of their own, which is given back when memory is short.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.cache import cache_names, prefill
from gemma4_compat._gemma4.quantization import experts
from gemma4_compat._graphs import deferred_stop, fused_steps, static_caches, steps
from gemma4_compat._graphs.captured_calls import Known
from gemma4_compat._kernels.specs import flash
from gemma4_compat._memory.formulas import MEASURED, repeated
from gemma4_compat._offload.transfer import streaming

if TYPE_CHECKING:
    from gemma4_compat._graphs.decoder import Decoding

#: Tokens of a forward, over all rows of a batch: more keep the GPU busy for longer than Python takes, and their
#: activations would fill the pool.
MAX_TOKENS = 2048
#: Inputs of a prompt whose forward is more than that of a text.
_NOT_TEXT = (
    *("pixel_values", "pixel_values_videos", "input_features", "mm_encoder_outputs", "inputs_embeds"),
    *("per_layer_inputs", "labels", "shared_kv_states"),
)
#: Inputs that ask for an output of every position.
RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits", "return_shared_kv_states")
MASKS = ("full_attention", "sliding_attention")
#: Tokens of a prompt that is fused, over all rows: longer ones take longer to fuse, and gain less.
MAX_FUSED = 512
_log = logging.getLogger("gemma4_compat")


class Progress(fused_steps.Progress):
    """When the graph of a prompt is to be fused: that takes seconds and saves milliseconds a prompt
    (docs/DECODING_NUMERICS.md).
    """

    early, after = 128, 256


class Prompt(steps.Step):
    """A forward of several tokens of text for each row of a batch, which returns the logits of the last one.

    Attributes:
        hides_nothing: what ``prefill.hides_nothing`` finds in its forward, which a capture cannot read.
    """

    decodes, progress = False, Progress

    def __init__(
        self, decoding: Decoding, model: Any, inputs: dict[str, Any], cache: Any, found: tuple[Any, ...] | None
    ) -> None:
        full, sliding = map(inputs["attention_mask"].get, MASKS)
        tokens = inputs[self.reads].shape[1]
        self.hides_nothing = full is None and sliding is not None and prefill.hides_nothing(sliding[:, :, -1:], tokens)
        self._started: tuple[Any, ...] = ()  # what there was before
        super().__init__(decoding, model, inputs, cache, found or ())
        self.statistics = decoding.prompts.statistics
        self.refused_as = "prompts"  # if one cannot be captured, no other is tried
        self.fuses &= inputs[self.reads].shape[:2].numel() <= MAX_FUSED

    @classmethod
    def of(cls, decoding: Decoding, model: Any, inputs: dict[str, Any], *_: Any) -> Prompt | None:
        """The prompt with these inputs; None if it is something else, or too long to be captured."""
        cache, ids = cache_names.cache_in(inputs), inputs.get("input_ids")
        if cache is None or ids is None or ids.ndim != 2 or not 1 < ids.shape[1] <= MAX_TOKENS // len(ids):
            return None
        if not has_masks(inputs) or not is_text(inputs) or not static_caches.is_static(cache):
            return None
        return cls(decoding, model, steps.without_token_types(inputs), cache, static_caches.tensors(cache))

    def _update_modes(self) -> tuple[Any, ...]:
        found = [static_caches.update_mode(layer, self.tokens) for layer in self.sliding]
        return (*found, self.hides_nothing, self.inputs[self.reads].shape[:2], static_caches.length(self.cache))

    def numerics(self) -> Any:
        return self.decoding.reading(self.device, self.cache)

    def is_served_by(self, graph: Any) -> bool:
        """The cache may take lent memory later."""
        memory = None if self.addresses else self.decoding.memory_of(self.cache)
        return memory is not None and bool(graph.addresses == memory.addresses)

    def begins(self, known: Known) -> bool:
        """Whether its cache has tensors, or takes those that were lent to it, of the layout that it would have."""
        if self.addresses or self.signature not in known.seen:
            return self.signature in known.seen
        memory = self.decoding.memory_of(self.cache)
        if memory is None or memory.layout() != known.seen[self.signature].layout:
            return False
        found = memory.fill(self.cache)
        self.addresses = () if found is None else memory.addresses
        return found is not None

    def unsupported(self, known: Known) -> str | None:
        return self.unsupported_model()

    def has_room(self, known: Known) -> bool:
        """Copies of the masks are new, and a graph keeps its memory, which experts that stay on the card need."""
        experts = self.decoding.experts
        beside = 0 if experts is None or experts.is_there else experts.nbytes
        return has_room(self.decoding, self.model, self.device, *_asked(self.inputs), beside=beside)

    def note(self, reason: str | BaseException) -> None:
        if isinstance(reason, str):
            super().note(reason)
        else:
            failed = f"a capture of a prompt failed with {steps.error_text(reason)}"
            self.decoding.reason(failed, "reading prompts eagerly")

    def layout(self) -> Any:
        return static_caches.layout(static_caches.tensors(self.cache) or ())

    def record(self, *args: Any) -> Any:
        with prefill.known_to_hide_nothing(self.hides_nothing):
            return super().record(*args)

    def replay(self, graph: Any, *, prepared: bool = False) -> Any:
        """Replay it, unless it was started already."""
        if not prepared:
            return super().replay(graph)
        return steps.exchanged(graph.outputs, steps.CACHE, self.cache, copies=True)

    def starts(self, known: Known, graph: Any) -> bool:
        """The look at the model takes a third of what Python does before a prompt. The cache is new, and nothing else
        is written.
        """
        memory = self.decoding.memory_of(self.cache)
        if memory is None or self.signature not in known.seen:
            return False
        if self.fuses:
            if graph.progress.is_next:
                return False  # nothing is captured before everything was looked at
            graph.progress.count()
        before = static_caches.attributes(self.cache)
        if not self.begins(known):
            return False
        random = deferred_stop.generator_of(self.device)
        self._started = memory, before, random, random.get_state()
        self.launch(graph, self.tensors)
        graph.recording.replay()
        static_caches.advance(self.sliding, self.added)
        return True

    def take_back(self) -> None:
        """Cache and random numbers are as they were."""
        import torch

        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # before anything that it reads is released
        memory, before, random, state = self._started
        random.set_state(state)
        memory.take_back(self.cache, before, self.decoding.drop)
        self.addresses = ()


def has_masks(inputs: dict[str, Any]) -> bool:
    """Whether these inputs have masks and positions: otherwise the forward makes them, from what the cache counts in
    Python.
    """
    import torch

    masks = inputs.get("attention_mask")
    if not isinstance(masks, dict) or not isinstance(inputs.get("position_ids"), torch.Tensor):
        return False
    return all([mask is None or isinstance(mask, torch.Tensor) for mask in masks.values()])


def is_text(inputs: dict[str, Any]) -> bool:
    """Whether these inputs are text only, and ask for the last logits only."""
    if any(inputs.get(name) is not None and inputs[name] != {} for name in _NOT_TEXT):
        return False
    return bool(inputs.get("logits_to_keep") == 1) and not any(inputs.get(name) for name in RECORDED)


def run(prompt: Prompt, *, first: bool) -> Any:
    """Read a prompt by replaying its graph. ``first``: nothing was replayed in this ``generate``.

    Returns:
        the model's output; None if it has to run without a graph, and nothing has run then.
    """
    calls = prompt.decoding.prompts
    if not calls.may_serve(prompt):
        return None  # without a look at the model
    if first and not prompt.addresses:
        outputs = calls.run_ahead(prompt)
        if outputs is not None:
            return outputs
    return calls.run(prompt, first=first)


def has_run(prompt: Prompt) -> None:
    """Note a prompt that has run without a graph: the next one of its signature may be captured."""
    decoding = prompt.decoding
    if decoding.prompts.has_run(prompt) > 1 and decoding.memory_of(prompt.cache) is None:
        decoding.memories.append(static_caches.Memory(prompt.cache))


def make_room(decoding: Decoding, model: Any, inputs: dict[str, Any]) -> None:
    """Before a forward without a graph: if it may need the memory that the graphs of prompts keep, drop them."""
    read = _read(inputs)
    if read is not None and read.shape[1] > 1:
        decoding.give_back_experts()
        masks = not isinstance(inputs.get("attention_mask"), dict)
        _make_room(decoding, model, read.device, *_asked(inputs), masks=masks)


def make_room_for_chunks(decoding: Decoding, model: Any, cache: Any, rows: int, size: int) -> None:
    """Before the masks of chunks are made, which graphs of other chunks may leave no memory for.

    Args:
        decoding: of the model.
        model: of transformers.
        cache: that they are read into, or None.
        rows: of a batch.
        size: tokens of a chunk, for each row.
    """
    with decoding.lock.held():
        shapes = (shape for graph in decoding.prompts.graphs() for shape, *_ in graph.signature[1])
        if (rows, size) in shapes:
            return  # these had room for their masks
        _make_room(decoding, model, model.device, rows, size, cache, masks=True)


def _make_room(
    decoding: Decoding, model: Any, device: Any, rows: int, tokens: int, cache: Any, *, masks: bool
) -> None:
    kept = decoding.head is not None or any(decoding.prompts.graphs())
    asked = decoding, model, device, rows, tokens, cache
    if not kept or has_room(*asked, masks=masks):
        return
    if not decoding.give_back_head() or not has_room(*asked, masks=masks):
        _log.debug("gemma4_compat: the graphs of prompts give back %d bytes", decoding.prompts.nbytes)
        decoding.prompts.release()


def _asked(inputs: dict[str, Any]) -> tuple[int, int, Any]:
    """Rows and tokens of a forward, and its cache."""
    rows, tokens = _read(inputs).shape[:2]
    return rows, tokens, cache_names.cache_in(inputs)


def _read(inputs: dict[str, Any]) -> Any:
    """Token ids or embeddings, (batch, tokens, ...)."""
    ids = inputs.get("input_ids")
    return inputs.get("inputs_embeds") if ids is None else ids


def has_room(
    decoding: Decoding,
    model: Any,
    device: Any,
    rows: int,
    tokens: int,
    cache: Any,
    *,
    masks: bool = True,
    beside: int = 0,
) -> bool:
    """Whether a forward fits twice into the memory that is free, ``beside`` so many bytes: see :func:`activations`."""
    left = host.free_memory(device, decoding.prompts.nbytes)
    if left is None:
        return True
    copies = not computes_attention(decoding, model, cache)
    return 2 * activations(model, rows, tokens, cache, masks=masks, copies=copies) + beside <= left


def computes_attention(
    decoding: Decoding, model: Any, cache: Any, heads: Collection[tuple[int, int, int]] = ()
) -> bool:
    """Whether custom kernels compute the attention of prompts that are read into this cache and have a mask.

    Args:
        decoding: of the model.
        model: of transformers.
        cache: static, or it is PyTorch that computes.
        heads: query heads, key-value heads and their width, of which kernels are tried if they have not been; without
            any, those that have been are known.
    """
    if not decoding.custom or cache is None or not static_caches.is_static(cache):
        return False
    from gemma4_compat._kernels.match import reading  # with torch

    if static_caches.length(cache) < reading.POSITIONS:
        return False
    return reading.computes(model.device, model.dtype, heads) if heads else reading.is_used(model.device)


def activations(model: Any, rows: int, tokens: int, cache: Any, *, masks: bool, copies: bool) -> int:
    """Bytes that a forward takes at most, roughly: an MLP, experts, per-layer inputs, attention, streamed layers.

    Args:
        model: of transformers.
        rows: of a batch.
        tokens: of the forward, for each row.
        cache: what it reads into; None or one that is not static: as long as the tokens.
        masks: whether it makes masks, which are there otherwise.
        copies: whether PyTorch computes attention: masks as numbers, and keys and values for each query head.
    """
    text, item = model.config.get_text_config(), int(model.dtype.itemsize)
    widest = int(text.intermediate_size) * (2 if getattr(text, "use_double_wide_mlp", False) else 1)
    per_layer = int(getattr(text, "hidden_size_per_layer_input", 0) or 0) * int(text.num_hidden_layers)
    heads = int(text.num_attention_heads) * int(getattr(text, "global_head_dim", 0) or 512)
    chosen = int(text.top_k_experts) if getattr(text, "enable_moe_block", False) else 0
    values = 6 * int(text.hidden_size) * (1 + chosen) + 4 * (widest + per_layer + heads)
    weight = 2 * widest * int(text.hidden_size)  # dequantized
    full = static_caches.length(cache) if cache is not None and static_caches.is_static(cache) else tokens
    sliding = min(full, int(getattr(text, "sliding_window", 0) or 0)) + tokens
    found = item * (rows * tokens * values + weight) + _experts(model, rows * tokens * chosen) + streaming.slots(model)
    pairs = rows * tokens * full
    if masks:
        found += pairs + rows * tokens * sliding
    if copies:
        return found + max(_copies(text, rows, tokens, seen, item) for seen in (full, sliding))
    kernels = flash.workspace(rows, int(text.num_attention_heads), int(getattr(text, "global_head_dim", 0) or 512))
    return found + max(kernels, pairs if masks else 0)  # while padding is hidden there are two masks


def _experts(model: Any, pairs: int) -> int:
    """What a layer's 4-bit experts take once they are dequantized, if a token chooses one so many times."""
    text = model.config.get_text_config()
    if not pairs or not any(
        experts.quantized_parameter(module, name) is not None
        for module in experts.all_experts(model).values()
        for name in experts.NAMES
    ):
        return 0
    each = 3 * int(text.moe_intermediate_size) * int(text.hidden_size)  # gate, up, down
    return min(pairs, int(text.num_experts)) * each * int(model.dtype.itemsize)


def _copies(text: Any, rows: int, tokens: int, seen: int, item: int) -> int:
    """What PyTorch's attention makes of a mask, keys and values."""
    of_full = getattr(text, "num_global_key_value_heads", None) if getattr(text, "attention_k_eq_v", False) else None
    kv_heads = int(of_full or text.num_key_value_heads)
    width = int(getattr(text, "global_head_dim", 0) or 512)
    pairs, heads = rows * tokens * seen, int(text.num_attention_heads)
    found = repeated(rows * seen, heads, kv_heads, width, item)
    if text._attn_implementation == "eager":
        return found + MEASURED.eager_scores * heads * pairs
    return found + 2 * pairs * item  # the mask as numbers, and a copy of them
