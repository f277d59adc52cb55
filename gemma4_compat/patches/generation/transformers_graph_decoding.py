"""With a static cache, decoding a quantized, offloaded or adapted model replays one CUDA graph per token.

Symptom: silent: ``generate(cache_implementation="static")`` decodes a 4-bit or offloaded Gemma 4 at the speed of
Python: 11 to 19 tokens a second on any GPU, although the same kernels take a fifth of the time.

Cause: A static cache exists to be compiled, but ``GenerationMixin._valid_auto_compile_criteria`` is False for every
model quantized by bitsandbytes and for every device map with ``"cpu"`` or ``"disk"`` in it. Each token then costs
22,000 to 36,000 calls of Python functions, and the GPU waits for them.

Fix: For Gemma 4 on CUDA, transformers gets a compiled call that replays: the step of one token is captured once as a
CUDA graph and launched again for each later token. The kernels are those of the eager step, so tokens and logits are
bit-identical; after a while small kernels are fused if that keeps the bits. After ``gemma4_compat.decode_fast(model)``
without ``exact=True``, kernels of this package compute attention and products; after either, prompts are replayed as
well, by their lengths, with the same bits, and one that does not fit into memory is read in chunks. If a prompt has
images or sounds, the text model's part is replayed. After ``decode_fast(assistants=True)``, calls with an assistant
model or prompt lookup are decoded in speculative steps that are replayed, with the tokens of calls without; where no
draft could have them (experts in bf16, a cache that holds the text's beginning), nothing is drafted. Weights, hooks,
adapters and the cache are checked before each replay. A new static cache is a copy of an unused one while the
configuration stays as it was (transformers 5.19 and newer). A call after ``decode_fast`` that returns its cache
returns a dynamic one, as without. Models that transformers compiles itself are left to it, unless ``decode_fast``
asked for a replay. What cannot be captured (8-bit layers, weights on disk, user hooks, several devices) runs as
before, and the log says why. ``disable_compile=True`` turns it off.

Remove when: transformers decodes quantized and offloaded models with a static cache faster than one Python call per
kernel.
"""

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation import call
from gemma4_compat._generation.prefix_cache import returned
from gemma4_compat._generation.prompts import buckets, chunks, embedded, prompts
from gemma4_compat._generation.speculative import assisted, drafted_calls
from gemma4_compat._graphs import decoder, deferred_stop, new_caches, static_caches, unsupported
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F52",
    kind="speed",
    severity="speed",
    affected=">=5.5",
    after=(
        "transformers-fp16-logits transformers-expanded-media transformers-model-device "
        "transformers-assisted-cache transformers-assisted-turns transformers-assistant-memory"
    ),
)

# Per thread, the decoder that `_sample` asks for next: it asks for the criteria and the call in one expression.
_next = threading.local()
#: The modes of ``transformers.generation.GenerationMode`` that read one token at a time.
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
#: Arguments of ``_assisted_decoding`` that the model does not get.
_OF_THE_LOOP = (
    *("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "inputs_tensor"),
    *("assistant_model", "assistant_tokenizer", "tokenizer"),
)
_GROWS = (
    "the call was given a cache that grows; pass the whole text instead, after decode_fast(model, "
    "reuse_prefix=True), or a StaticCache that has room for it"
)
_AS_TRANSFORMERS = "decoding with an assistant as transformers does"
_TOKENS = 8
#: TRL's trainers make such a configuration.
_BY_TRAINERS = (
    "disable_compile is set, as TRL's trainers do (trainer.generation_config.disable_compile = False lets rollouts "
    "replay)"
)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin.generate", dormant=True)
def generate(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not decoder.is_preferred(self):
        return original(self, *args, **kwargs)
    with returned.running(self, is_own=callable(kwargs.get("custom_generate"))) as running:
        output = original(self, *args, **kwargs)
    return running.output(output)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prepare_cache_for_generation")
def prepare_cache(
    original: Original,
    self: Any,
    generation_config: Any,
    model_kwargs: Any,
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> Any:
    length, given, running = max_cache_length, cache_names.cache_in(model_kwargs), returned.current(self)
    if decoder.is_preferred(self) and hasattr(given, "layers"):
        given._is_user_defined = True  # as newer releases do
    if (
        decoder.is_preferred(self)
        and self.device.type in RECORDERS
        and generation_mode.value in _MODES
        and generation_config.cache_implementation is None
        and generation_config.use_cache is not False
        and not (running is not None and running.is_own)
    ):
        refused = unsupported.virtual_tokens_reason(self)
        if given is not None:
            if not static_caches.is_static(given):
                decoder.of(self).reason(_GROWS)
        elif refused is None:
            if running is not None and generation_config.return_dict_in_generate:
                made = dict(model_kwargs)
                original(self, generation_config, made, generation_mode, batch_size, length)
                running.cache = cache_names.cache_in(made)
            generation_config.cache_implementation = "static"  # only for this call: it is a copy
            if decoder.of(self).any_length:
                length = buckets.room(max_cache_length)
        else:
            decoder.of(self).reason(refused)
    with _lazily(self):
        return original(self, generation_config, model_kwargs, generation_mode, batch_size, length)


@contextlib.contextmanager
def _lazily(model: Any) -> Iterator[None]:
    """Inside, a static cache for chunks gets no memory in advance (transformers from 5.13 on): it takes that of the
    last one, whose addresses graphs hold.
    """
    name = "_get_static_cache_init_shape"
    if decoder.is_preferred(model) and hasattr(model, name):
        with in_place.replaced(model, name, lambda _below: None):
            yield
    else:
        yield


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prefill")
def prefill(
    original: Original,
    self: Any,
    input_ids: Any,
    generation_config: Any,
    model_kwargs: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """After ``decode_fast``, a prompt is read at once where that fits into memory, with a call that replays."""
    cache, size = cache_names.cache_in(model_kwargs), generation_config.prefill_chunk_size
    if not decoder.is_preferred(self):
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    if size is not None:
        prompts.make_room_for_chunks(decoder.of(self), self, cache, len(input_ids), min(size, input_ids.shape[1]))
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    given = None if generation_config.disable_compile else call.decoder_for(self, cache)

    def whole() -> Any:
        called = self if given is None else _Called(self, given)
        return original(called, input_ids, generation_config, model_kwargs, *args, **kwargs)

    def in_chunks(size: int) -> Any:
        config = copy.copy(generation_config)
        config.prefill_chunk_size = size
        return self._prefill(input_ids, config, model_kwargs, *args, **kwargs)  # by all patches of it

    def in_buckets() -> Any:
        outputs = buckets.read(given, input_ids, generation_config, model_kwargs)
        return whole() if outputs is None else outputs

    tokens = chunks.may_be_cut(self, input_ids, generation_config, model_kwargs)
    decoding = decoder.of(self)
    at_once = in_buckets if given is not None and decoding.any_length else whole
    if not tokens:
        return at_once()
    memory = chunks.Room(self, cache, len(input_ids), tokens)
    estimated = decoding.custom and at_once is whole and given is not None
    return chunks.read(decoding, model_kwargs, memory, at_once, in_chunks, estimated=estimated)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._valid_auto_compile_criteria")
def valid_auto_compile_criteria(
    original: Callable[..., bool], self: Any, model_kwargs: Any, generation_config: Any, *args: Any, **kwargs: Any
) -> bool:
    found = original(self, model_kwargs, generation_config, *args, **kwargs)
    _next.decoder = None
    if generation_config.disable_compile and self.training and decoder.is_preferred(self):
        decoder.of(self).reason(_BY_TRAINERS)
    if generation_config.disable_compile or (found and not decoder.is_preferred(self)):
        return found
    _next.decoder = call.decoder_for(self, cache_names.cache_in(model_kwargs))
    return found or _next.decoder is not None


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel.get_compiled_call")
def compiled_call(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    given, _next.decoder = getattr(_next, "decoder", None), None
    if given is None or given.model is not self:
        return original(self, *args, **kwargs)
    running = deferred_stop.current()
    if running is not None:
        running.replays = True
    return given


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._beam_search")
def beam_search(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    cache, config = cache_names.cache_in(kwargs), kwargs.get("generation_config")
    given = None if config is None or config.disable_compile else call.decoder_for(self, cache)
    if given is None:
        return original(self, *args, **kwargs)
    with static_caches.reordered_in_place(cache):
        return original(_Called(self, given), *args, **kwargs)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._assisted_decoding")
def assisted_decoding(original: Original, self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    """After ``decode_fast(assistants=True)``, in speculative steps that are replayed. Where none could have drafts, as
    without an assistant; where they cannot do what the call asks for, as before. The log says why.
    """
    config = kwargs.get("generation_config")
    decoding = decoder.of(self) if decoder.is_preferred(self) else None
    if args or config is None or config.disable_compile or decoding is None:
        return original(self, input_ids, *args, **kwargs)
    if not decoding.assistants:
        if decoding.custom:
            decoding.reason("decode_fast was called without assistants=True", _AS_TRANSFORMERS)
        return original(self, input_ids, **kwargs)
    undrafted = drafted_calls.undrafted_reason(self, input_ids, config, kwargs)
    reason = undrafted or drafted_calls.unsupported_reason(self, input_ids, config, kwargs)
    if reason is not None:
        decoding.reason(reason, "decoding without drafts" if undrafted else _AS_TRANSFORMERS)
    if reason is not None and not undrafted:
        return original(self, input_ids, **kwargs)
    given = {name: kwargs.pop(name, None) for name in _OF_THE_LOOP}
    prepared = dict(kwargs)
    if drafted_calls.keeps_all(config):
        decoding.reason("a cache that keeps all keys is returned")
    elif not drafted_calls.is_given(cache_names.cache_in(kwargs)):
        prepared = {name: value for name, value in kwargs.items() if name not in cache_names.NAMES}
        config.cache_implementation = None  # of this call: it is a copy
        mode = type(config.get_generation_mode())("sample")
        self._prepare_cache_for_generation(config, prepared, mode, len(input_ids), config.max_length - 1)
    if undrafted:
        options = {name: given[name] for name in ("logits_processor", "stopping_criteria", "streamer")}
        return self._sample(input_ids, generation_config=config, **options, **prepared)
    functions = [*given["logits_processor"], *given["stopping_criteria"]]
    samples = bool(config.do_sample)
    with deferred_stop.sampling(functions, samples=samples, streamer=given["streamer"]):
        return assisted.Text(self, input_ids, config, given).decode(prepared)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.forward", group="gemma4", dormant=True)
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedTextModel.forward", group="gemma4_unified", dormant=True)
def text_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """After ``decode_fast``, the text model's part of a prompt with images or sounds is replayed."""
    import torch

    reader = None if args or torch.compiler.is_compiling() else embedded.waiting(self)
    if reader is None:
        return original(self, *args, **kwargs)
    return reader(functools.partial(original, self), kwargs)


class _Called(Proxy):
    """A view of a model that calls a decoder. Everything else is the model's."""

    def __init__(self, model: Any, given: call.Decoder) -> None:
        super().__init__(model)
        self._self_given = given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._self_given(*args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    """How often the Python of a layer runs while tokens are decoded. Without a GPU, a stand-in captures."""
    import torch

    from gemma4_compat._lab import scenarios, tiny
    from gemma4_compat._lab.stand_ins import tape

    model = workspace.load("4bit")
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS}
    options |= {"do_sample": False, "cache_implementation": "static"}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    mlp = type(model.get_decoder().layers[0].mlp)
    with torch.no_grad(), tape.standing_in(RECORDERS):
        expected = model.generate(**options, disable_compile=True)
        with scenarios.noted(mlp, "forward") as calls:
            found = model.generate(**options)
    steps = len(calls) / len(model.get_decoder().layers)
    off = max((one - other).abs().max().item() for one, other in zip(expected.logits, found.logits))
    return Outcome(
        steps == _TOKENS,
        f"{_TOKENS} tokens with a static cache run the Python of every layer {steps:.0f} times",
        parity=off,
    )


PATCH.replaces("transformers.cache_utils", "StaticCache.__init__", affected=">=5.19.0")(new_caches.construct)
