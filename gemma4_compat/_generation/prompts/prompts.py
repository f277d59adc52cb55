"""Prompts after ``decode_fast``: a forward of several tokens is captured by its exact shape, and replayed.

The first forward of a kind runs without a graph; the second is captured, if the cache has the memory of an earlier one
(or is in use already, as for the chunks of a long prompt). A replay has the bits of the forward without a graph.
The graph of a short one is captured again with fused kernels (:mod:`fused_steps`).
Graphs are kept apart from those of steps, in a memory pool of their own, which is given back when memory is short.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._graphs import deferral, fused_steps, obstacles, static_caches, steps
from gemma4_compat._graphs.graphs import REMEMBERED, Graph, Variant
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat._kernels.specs import flash
from gemma4_compat._models import attention_memory, cache_names, prefill
from gemma4_compat._offload import idle_hooks, streaming
from gemma4_compat._quantization import experts

if TYPE_CHECKING:
    from gemma4_compat._graphs.decoder import Decoding

#: Graphs of prompts that are kept for one model. The least recently used one goes first.
MAX_GRAPHS = 16
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
#: The replay in which the graph of a prompt is captured again with fused kernels (:mod:`fused_steps`), and the one
#: that waits for their compiler. It takes seconds and saves milliseconds a prompt (docs/DECODING.md).
FUSED_EARLY, FUSED_AFTER = 128, 256
#: Tokens of a prompt that is fused, over all rows: longer ones take longer to fuse, and gain less.
MAX_FUSED = 512
_log = logging.getLogger("gemma4_compat")


class Progress(fused_steps.Progress):
    """When the graph of a prompt is to be fused."""

    @staticmethod
    def _bounds() -> tuple[int, int]:
        return FUSED_EARLY, FUSED_AFTER


class Prompt(steps.Step):
    """A forward of several tokens of text for each row of a batch, which returns the logits of the last one.

    Attributes:
        hides_nothing: what ``prefill.hides_nothing`` finds in its forward, which a capture cannot read.
    """

    decodes = False

    def __init__(self, inputs: dict[str, Any], cache: Any, found: tuple[Any, ...] | None) -> None:
        full, sliding = map(inputs["attention_mask"].get, MASKS)
        tokens = inputs[self.reads].shape[1]
        self.hides_nothing = full is None and sliding is not None and prefill.hides_nothing(sliding[:, :, -1:], tokens)
        super().__init__(inputs, cache, found or ())

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> Prompt | None:
        """The prompt with these inputs; None if it is something else, or too long to be captured."""
        cache, ids = cache_names.cache_in(inputs), inputs.get("input_ids")
        if cache is None or ids is None or ids.ndim != 2 or not 1 < ids.shape[1] <= MAX_TOKENS // len(ids):
            return None
        if not has_masks(inputs) or not is_text(inputs) or not static_caches.is_static(cache):
            return None
        return cls(steps.without_token_types(inputs), cache, static_caches.tensors(cache))

    def _ways(self) -> tuple[Any, ...]:
        found = [static_caches.way(layer, self.tokens) for layer in self.sliding]
        return (*found, self.hides_nothing, self.inputs[self.reads].shape[:2], static_caches.length(self.cache))

    def takes(self, memory: static_caches.Memory | None, layout: Any) -> bool:
        """Whether the cache has its tensors, or takes those that were lent to it, of this layout, now."""
        if self.addresses:
            return True
        if memory is None or memory.layout() != layout:
            return False
        found = memory.fill(self.cache)
        self.addresses = () if found is None else memory.addresses
        return found is not None


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


def run(decoding: Decoding, model: Any, prompt: Prompt, *, first: bool) -> Any:
    """Read a prompt by replaying its graph. ``first``: nothing was replayed in this ``generate``.

    Returns:
        the model's output; None if it has to run without a graph, and nothing has run then.
    """
    if decoding.pauses or not any(prompt.kind in variant.read for variant in decoding.variants):
        return None  # without a look at the model
    if first and not prompt.addresses:
        outputs = _ahead(decoding, model, prompt)
        if outputs is not None:
            return outputs
    variant = decoding.variant(model, in_full=first)
    if variant.prompts_refused or prompt.kind not in variant.read:
        return None
    if not prompt.takes(decoding.memory_of(prompt.cache), variant.read[prompt.kind]):
        return None
    graph = variant.prompts.get((prompt.addresses, prompt.kind)) or _captured(decoding, model, prompt, variant)
    if graph is None:
        return None
    decoding.launch(graph, prompt)
    if not (_is_fused(decoding, prompt) and graph.progress.is_due() and _fused(decoding, model, prompt, graph)):
        graph.recording.replay()
    return _replayed(decoding, prompt, variant, graph)


def _is_fused(decoding: Decoding, prompt: Prompt) -> bool:
    """Whether graphs of such a prompt are fused at all."""
    return decoding.fuses and prompt.inputs[prompt.reads].shape[:2].numel() <= MAX_FUSED


def _fused(decoding: Decoding, model: Any, prompt: Prompt, graph: Graph) -> bool:
    """Whether this call replayed the prompt, because its graph is fused from now on."""
    before = _unused(prompt.device)
    with prefill.known_to_hide_nothing(prompt.hides_nothing):
        found = decoding.replay_fused(model, graph, prompt)
    decoding.prompt_bytes += max(_unused(prompt.device) - before, 0)
    decoding.statistics.prompts_fused += int(found)
    return found


def _replayed(decoding: Decoding, prompt: Prompt, variant: Variant, graph: Graph) -> Any:
    """Count a replay that is under way. Returns the model's output."""
    variant.prompts.move_to_end((prompt.addresses, prompt.kind))
    static_caches.advance(prompt.sliding, prompt.added)
    decoding.statistics.prompts_replayed += 1
    return steps.copied(graph.outputs, prompt.cache)


def _ahead(decoding: Decoding, model: Any, prompt: Prompt) -> Any:
    """Launch a known graph after a look at the memory it reads, and at the rest while the GPU computes.

    That look takes a third of what Python does before a prompt. The cache is new, and nothing else is written.

    Returns:
        the model's output; None if no graph is known, or if something has changed: then cache and random numbers are
        as they were.
    """
    import torch

    memory, variant = decoding.memory_of(prompt.cache), decoding.variants[0]
    if memory is None or prompt.kind not in variant.read:
        return None
    graph, guards = variant.prompts.get((memory.addresses, prompt.kind)), variant.guards
    if graph is None or not guards.check_memory():
        return None
    if _is_fused(decoding, prompt):
        if graph.progress.is_next:
            return None  # nothing is captured before everything was looked at
        graph.progress.count()
    before = static_caches.attributes(prompt.cache)
    if not prompt.takes(memory, variant.read[prompt.kind]):
        return None
    random = deferral.generator_of(prompt.device)
    state = random.get_state()
    decoding.launch(graph, prompt)
    graph.recording.replay()
    with idle_hooks.put_back(model):
        holds = guards.check_rest() and guards.check_all()
    if holds:
        return _replayed(decoding, prompt, variant, graph)
    if prompt.device.type == "cuda":
        torch.cuda.current_stream(prompt.device).synchronize()  # before anything that it reads is released
    random.set_state(state)
    memory.take_back(prompt.cache, before, decoding.drop)
    prompt.addresses = ()
    return None


def has_run(decoding: Decoding, model: Any, prompt: Prompt) -> None:
    """Note a prompt that has run without a graph: the next one of its kind may be captured."""
    found = static_caches.tensors(prompt.cache)
    variant = decoding.variant(model, in_full=False, settling=True)
    if found is None or variant.prompts_refused:
        return
    if prompt.kind in variant.read and decoding.memory_of(prompt.cache) is None:
        decoding.memories.append(static_caches.Memory(prompt.cache))
    variant.read[prompt.kind] = static_caches.layout(found)
    variant.read.move_to_end(prompt.kind)
    if len(variant.read) > REMEMBERED:
        variant.read.popitem(last=False)


def _captured(decoding: Decoding, model: Any, prompt: Prompt, variant: Variant) -> Graph | None:
    """Capture the forward of a prompt without running it. None, with model and cache unchanged, if that fails."""
    obstacle = RECORDERS[prompt.device.type].obstacle() or obstacles.find(model, obstacles.modules_of_a_step(model))
    if obstacle is not None:
        decoding.reason(obstacle)
        variant.prompts_refused = True
        return None
    while sum(len(other.prompts) for other in decoding.variants) >= MAX_GRAPHS:
        next(other for other in reversed(decoding.variants) if other.prompts).prompts.popitem(last=False)
    if not has_room(decoding, model, prompt.device, *_asked(prompt.inputs)):  # copies of the masks are new
        return None
    begun, before = time.perf_counter(), _unused(prompt.device)
    graph = _recorded(decoding, model, prompt, variant)
    if graph is None:
        return None
    decoding.prompt_bytes += max(_unused(prompt.device) - before, 0)
    decoding.statistics.prompts_captured += 1
    decoding.statistics.capture_seconds += time.perf_counter() - begun
    decoding.keep_memory(prompt.cache)
    variant.prompts[prompt.addresses, prompt.kind] = graph
    return graph


def _recorded(decoding: Decoding, model: Any, prompt: Prompt, variant: Variant) -> Graph | None:
    try:
        if not any(_all(decoding)):
            decoding.prompt_pool, decoding.prompt_bytes = RECORDERS[prompt.device.type].new_pool(), 0
        static = prompt.static_inputs()
        with prefill.known_to_hide_nothing(prompt.hides_nothing):
            recording, outputs = decoding.recorded(model, prompt, static, decoding.prompt_pool)
    except Exception as error:  # noqa: BLE001  # whatever it is, the prompt can run without a graph
        decoding.reason_of(error, prompt=True)
        variant.prompts_refused = True
        return None
    return Graph(recording, steps.kept(static, prompt.cache), steps.tensors(static), outputs, Progress())


def _all(decoding: Decoding) -> Iterator[Graph]:
    return (graph for variant in decoding.variants for graph in variant.prompts.values())


def release(decoding: Decoding) -> bool:
    """Drop all graphs of prompts, and with them their pool. False if there are none."""
    found = any(_all(decoding))
    for variant in decoding.variants:
        variant.prompts.clear()
    decoding.prompt_pool, decoding.prompt_bytes = None, 0
    return found


def make_room(decoding: Decoding, model: Any, inputs: dict[str, Any]) -> None:
    """Before a forward without a graph: if it may need the memory that the graphs of prompts keep, drop them."""
    read = _read(inputs)
    if read is not None and read.shape[1] > 1:
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
        kinds = [kind for variant in decoding.variants for _, kind in variant.prompts]
        if any(shape == (rows, size) for kind in kinds for shape, *_ in kind[1]):
            return  # these had room for their masks
        _make_room(decoding, model, model.device, rows, size, cache, masks=True)


def _make_room(
    decoding: Decoding, model: Any, device: Any, rows: int, tokens: int, cache: Any, *, masks: bool
) -> None:
    if any(_all(decoding)) and not has_room(decoding, model, device, rows, tokens, cache, masks=masks):
        _log.debug("gemma4_compat: the graphs of prompts give back %d bytes", decoding.prompt_bytes)
        release(decoding)


def _asked(inputs: dict[str, Any]) -> tuple[int, int, Any]:
    """Rows and tokens of a forward, and its cache."""
    rows, tokens = _read(inputs).shape[:2]
    return rows, tokens, cache_names.cache_in(inputs)


def _read(inputs: dict[str, Any]) -> Any:
    """Token ids or embeddings, (batch, tokens, ...)."""
    ids = inputs.get("input_ids")
    return inputs.get("inputs_embeds") if ids is None else ids


def has_room(
    decoding: Decoding, model: Any, device: Any, rows: int, tokens: int, cache: Any, *, masks: bool = True
) -> bool:
    """Whether a forward fits twice into the memory that is free: see :func:`activations`."""
    left = free(device, decoding.prompt_bytes if any(_all(decoding)) else 0)
    if left is None:
        return True
    copies = not computes_attention(decoding, model, cache)
    return 2 * activations(model, rows, tokens, cache, masks=masks, copies=copies) <= left


def computes_attention(
    decoding: Decoding, model: Any, cache: Any, heads: Collection[tuple[int, int, int]] = ()
) -> bool:
    """Whether kernels of our own compute the attention of prompts that are read into this cache and have a mask.

    Args:
        decoding: of the model.
        model: of transformers.
        cache: static, or it is PyTorch that computes.
        heads: query heads, key-value heads and their width, of which kernels are tried if they have not been; without
            any, those that have been are known.
    """
    if not decoding.own or cache is None or not static_caches.is_static(cache):
        return False
    from gemma4_compat._kernels.match import reading  # with torch

    if static_caches.length(cache) < reading.POSITIONS:
        return False
    return reading.computes(model.device, model.dtype, heads) if heads else reading.is_used(model.device)


def free(device: Any, kept: int = 0) -> int | None:
    """Bytes that PyTorch can still allocate; None for a device without CUDA.

    Args:
        device: a ``torch.device``.
        kept: unused bytes that belong to graphs.
    """
    import torch

    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - kept
    return int(torch.cuda.mem_get_info(device)[0] + max(unused, 0))


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
    found = attention_memory.repeated(rows * seen, heads, kv_heads, width, item)
    if text._attn_implementation == "eager":
        return found + attention_memory.EAGER_SCORES * heads * pairs
    return found + 2 * attention_memory.mask_as_numbers(pairs, item)  # and a copy of them


def _unused(device: Any) -> int:
    """Bytes that PyTorch's allocator keeps from the GPU and no tensor has, without what is only cached."""
    import torch

    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
