"""A model with KV-shared layers and without per-layer inputs reads texts of several tokens.

Symptom: ``TypeError: 'NoneType' object is not subscriptable`` in ``_maybe_slice_kv_shared_inputs``, raised by
transformers 5.23.0 and 5.24.0 in each forward of several tokens, and so by training and ``generate``. It hits a
``Gemma4ForCausalLM`` of your own with ``num_kv_shared_layers`` and ``hidden_size_per_layer_input=0``, and a
``Gemma4AssistantForCausalLM`` that you train.

Cause: Before its first KV-shared layer, ``Gemma4TextModel`` slices all inputs to the positions whose logits are asked
for. It slices the per-layer inputs as well, which are None if ``hidden_size_per_layer_input`` is 0. Released models
have KV-shared layers and per-layer inputs (E2B, E4B) or neither. Released assistants have only the former, but read
one token at a time, for which nothing is sliced. ``gemma4_unified`` (the 12B) slices no per-layer inputs.

Fix: The method gets empty per-layer inputs in place of None, and what it returns has None again. So the other inputs
are sliced as upstream slices them. It sleeps until a model of that kind is created. Unpickling a whole model does not
wake it.

Remove when: ``_maybe_slice_kv_shared_inputs`` accepts None as the per-layer inputs.
"""

from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F108",
    severity="crash",
    affected=">=5.23.0",
    after="transformers-rotary-order transformers-rotary-cast transformers-sliced-prompts",
)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextRotaryEmbedding.__init__", activator=True)
def rotary_embedding(original: Original, self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Every text model has one."""
    if getattr(config, "num_kv_shared_layers", 0) and not getattr(config, "hidden_size_per_layer_input", 0):
        dormant.activate(PATCH.id)
    return original(self, config, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel._maybe_slice_kv_shared_inputs", dormant=lambda late: not late)
def slice_inputs(
    original: Original, self: Any, hidden_states: Any, per_layer_inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    if per_layer_inputs is not None:
        return original(self, hidden_states, per_layer_inputs, *args, **kwargs)
    nothing = hidden_states.new_empty(*hidden_states.shape[:2], 0, 0)  # batch, tokens, layers, width
    hidden_states, _, *others = original(self, hidden_states, nothing, *args, **kwargs)
    return hidden_states, None, *others


def reproduce(workspace: Workspace) -> Outcome:
    """A forward and a greedy ``generate``; ``output_hidden_states`` makes upstream slice nothing."""
    import torch

    from gemma4_compat._lab import tiny_models

    workspace.needs("shared_keys_and_values")
    model = tiny_models.without_per_layer_inputs(workspace.checkpoint).to(workspace.main)
    batch = workspace.inputs(text_only=True)
    with torch.no_grad():
        found = model(**batch).logits
        expected = model(**batch, output_hidden_states=True).logits
    options = {"max_new_tokens": 4, "do_sample": False}
    tokens, unsliced = (model.generate(**batch, **options, output_hidden_states=asked) for asked in (False, True))
    parity = (found - expected).abs().max().item() if torch.equal(tokens, unsliced) else float("inf")
    return Outcome(False, f"{found.shape[1]} tokens are read without per-layer inputs", parity)
