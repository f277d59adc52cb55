"""With a static cache, KV-shared layers compute the last position of a prompt only (E2B, E4B).

Symptom: silent: under a static cache, also after ``decode_fast``, an E2B or E4B computes its KV-shared layers (20 of
35, 18 of 42) for every position of a prompt; under the default cache for the last one only.

Cause: From 5.23.0 on, ``Gemma4TextModel`` computes its KV-shared layers only for the positions whose logits are asked
for: nothing reads the others. With a static cache whose mask is left out it does not. Its keys are followed by empty
slots, to which a single position without a mask would attend.

Fix: These positions are sliced there as well, and a KV-shared layer without a mask gets the keys and values of the
prompt, without the empty slots. These are the calls that the default cache makes, so logits are those of the default
cache, bit for bit where the other layers have its keys and masks. What transformers does not slice with its default
cache is left alone: ``output_hidden_states``, several positions, flash and flex attention.

Remove when: transformers slices prompts with static caches.
"""

from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat._gemma4.cache import cache_names, prefill
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F84", kind="speed", severity="speed", affected=">=5.23.0", after="transformers-unread-chunks")

_FULL, _SLIDING = "full_attention", "sliding_attention"


@PATCH.replaces("transformers.cache_utils", "StaticCache.__init__", activator=True)
def static_cache(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    dormant.activate(PATCH.id)
    return original(self, *args, **kwargs)


# A cache from before is only not sliced.
@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel._maybe_slice_kv_shared_inputs", dormant=True)
def slice_inputs(
    original: Original,
    self: Any,
    hidden_states: Any,
    per_layer_inputs: Any,
    position_embeddings: Any,
    masks: Any,
    logits_to_keep: Any,
    **kwargs: Any,
) -> Any:
    inputs = (hidden_states, per_layer_inputs, position_embeddings, masks, logits_to_keep)
    tokens = hidden_states.shape[1]
    if (
        tokens == 1
        or not isinstance(logits_to_keep, int)
        or logits_to_keep != 1
        or masks[_FULL] is not None
        or not getattr(cache_names.cache_in(kwargs), "is_compileable", False)
    ):
        return original(self, *inputs, **kwargs)
    kwargs |= {name: None for name in cache_names.NAMES if name in kwargs}
    *sliced, masks = original(self, *inputs, **kwargs)
    if (
        sliced[0].shape[1] == 1
        and tokens < self.config.sliding_window
        and prefill.hides_nothing(masks[_SLIDING], tokens)
    ):
        masks = masks | {_SLIDING: None}  # as with the default cache
    return *sliced, masks


# A cache from before is only not sliced.
@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextDecoderLayer.__call__", dormant=True)
def decoder_layer(original: Original, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    if hidden_states.shape[1] == 1 and self.self_attn.is_kv_shared_layer and kwargs.get("attention_mask") is None:
        positions, states = kwargs.get("position_ids"), kwargs.get("shared_kv_states")
        if positions is not None and states is not None:
            _cut(states, self.self_attn.layer_type, positions.shape[-1])
    return original(self, hidden_states, *args, **kwargs)


def _cut(states: Any, kind: str, tokens: int) -> None:
    """Drop a static cache's slots after the prompt, which is as long as ``position_ids``: these are never sliced."""
    keys, values = states[kind]
    if keys.shape[2] > tokens > 1:
        states[kind] = keys[:, :, :tokens], values[:, :, :tokens]


def reproduce(workspace: Workspace) -> Outcome:
    """How many positions of a prompt KV-shared layers compute, and the logits of the default cache."""
    from gemma4_compat._lab import tiny

    workspace.needs("shared_keys_and_values")
    model = workspace.load().float()
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": 1, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True, "disable_compile": True}
    shared = [layer.mlp for layer in model.get_decoder().layers if layer.self_attn.is_kv_shared_layer]
    rows: list[int] = []
    for mlp in shared:
        mlp.register_forward_pre_hook(lambda _module, inputs: rows.append(inputs[0].shape[1]))
    expected, found = (model.generate(**options, **kind) for kind in ({}, {"cache_implementation": "static"}))
    default, static = (rows[start : start + len(shared)] for start in (0, len(shared)))
    same = expected.sequences.equal(found.sequences)
    return Outcome(
        static != default,
        f"KV-shared layers compute {max(static)} positions of a prompt with a static cache, {max(default)} without",
        parity=(expected.logits[0] - found.logits[0]).abs().max().item() if same else float("inf"),
    )
