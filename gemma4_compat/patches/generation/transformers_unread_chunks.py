"""A prompt read in chunks runs KV-shared layers for its last chunk only (E2B, E4B).

Symptom: silent: with ``prefill_chunk_size``, KV-shared layers (20 of 35 on the E2B, 18 of 42 on the E4B) compute every
chunk of a prompt, though only the output of the last one is read. Where they are offloaded, each chunk brings their
weights to the device.

Cause: ``GenerationMixin._prefill`` calls the model for each chunk and keeps the cache; it reads the logits of the last
chunk. A KV-shared layer reads the keys and values of an earlier layer and writes none, so it adds nothing to a cache.

Fix: In all chunks but the last, a KV-shared layer returns its input, before its hooks run: its weights stay where they
are. The output of such a chunk has no logits. The cache and all that ``generate`` returns are bit-exact. All layers
run where something may read more: ``output_hidden_states``, ``output_attentions`` or ``output_router_logits``, hooks
or forwards of your own in the language model, training mode, and layers that are wrapped (FSDP, ``torch.compile`` of
single layers).

Remove when: transformers does not run KV-shared layers for chunks whose logits it does not read.
"""

import functools
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._gemma4.cache import prefill as prefill_of
from gemma4_compat._graphs import unsupported
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F84",
    kind="speed",
    severity="speed",
    affected=">=5.5",
    after=(
        "transformers-shared-kv transformers-chunked-media transformers-chunked-images "
        "transformers-chunked-turns transformers-held-prompts"
    ),
)

_GEMMA4 = ("gemma4", "gemma4_text")  # the others have no KV-shared layers, or nothing else
_LAYER = prefill_of.UNREAD_LAYER
_UNREAD = prefill_of.UNREAD
_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prefill")
def prefill(
    original: Original,
    self: Any,
    input_ids: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if generation_config.prefill_chunk_size is not None and self.config.model_type in _GEMMA4:
        tokens = prefill_of.new_tokens(input_ids, generation_config, model_kwargs)
        if not _may_read_more(self, generation_config):
            dormant.activate(PATCH.id)
            self = _InChunks(self, tokens)
    return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, f"{_LAYER}.__call__", dormant=True)
def decoder_layer(original: Original, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.pop(_UNREAD, False) and self.self_attn.is_kv_shared_layer:
        return hidden_states
    return original(self, hidden_states, *args, **kwargs)


class _InChunks(Proxy):
    """A view of a model that reads a prompt in chunks. Everything but its calls is the model's.

    Args:
        model: a transformers model.
        tokens: of the prompt that are left to read, or fewer: the rest is read like a last chunk.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        super().__init__(model)
        self._self_left = tokens

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        return self._call(self.__wrapped__, *args, **inputs)

    def get_compiled_call(self, *args: Any, **kwargs: Any) -> Any:
        return functools.partial(self._call, self.__wrapped__.get_compiled_call(*args, **kwargs))

    def _call(self, call: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        ids = inputs.get("input_ids")
        self._self_left = 0 if ids is None else self._self_left - ids.shape[1]
        if self._self_left <= 0 or any(inputs.get(name) for name in _RECORDED):
            return call(*args, **inputs)
        outputs = call(*args, **inputs, **{_UNREAD: True})
        outputs.logits = None  # those of a layer in the middle
        return outputs


def _may_read_more(model: Any, generation_config: Any) -> bool:
    """Whether anything may read what KV-shared layers compute for a chunk that is not the last."""
    text = model.config.get_text_config()
    if not text.num_kv_shared_layers or any(type(layer).__name__ != _LAYER for layer in model.get_decoder().layers):
        return True
    if any(getattr(config, name, False) for config in (generation_config, model.config, text) for name in _RECORDED):
        return True
    modules = unsupported.modules_of_a_step(model)
    return (
        any(module.training or unsupported.has_own_forward(module) for module in modules)
        or next(unsupported.hook_reasons(model, modules), None) is not None
    )


def reproduce(workspace: Workspace) -> Outcome:
    """How often KV-shared layers run for a prompt in chunks, and the logits of the same chunks with all layers."""
    from gemma4_compat._lab import scenarios, tiny

    workspace.needs("shared_keys_and_values")
    model = workspace.load()
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": 4, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    layers = model.get_decoder().layers
    shared = [layer.mlp for layer in layers if layer.self_attn.is_kv_shared_layer]

    def every_layer_runs(_module: Any, _inputs: Any) -> None:
        """A hook of the user's, as far as the patch knows."""

    every_layer_runs.__module__ = "__main__"
    handle = model.get_decoder().register_forward_pre_hook(every_layer_runs)
    expected = model.generate(**options, prefill_chunk_size=_SIZE)
    handle.remove()
    with scenarios.noted(type(shared[0]), "forward", lambda mlp, *_, **__: mlp in shared) as calls:
        found = model.generate(**options, prefill_chunk_size=_SIZE)
    chunks = -(-options["input_ids"].shape[1] // _SIZE)
    times = sum(calls) // len(shared) - (options["max_new_tokens"] - 1)
    off = max((one - other).abs().max().item() for one, other in zip(expected.logits, found.logits))
    if not expected.sequences.equal(found.sequences):
        off = float("inf")
    return Outcome(times > 1, f"KV-shared layers run {times} times for a prompt in {chunks} chunks", parity=off)


_SIZE = 5
