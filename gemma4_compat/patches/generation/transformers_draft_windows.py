"""A draft model drafts several tokens past its sliding window, and after rejected ones.

Symptom: ``RuntimeError: The size of tensor a (13) must match the size of tensor b (8) at non-singleton dimension 3``
from ``generate(assistant_model=...)``, if the text is longer than the draft model's sliding window, and the draft
model is sure of several tokens. In 5.15, rejecting several is ``RuntimeError: cannot reshape tensor of 0 elements``.

Cause: For assisted generation a ``DynamicSlidingWindowLayer`` keeps what leaves its window, until rejected tokens are
removed. A draft model runs once for each token of a draft, and nothing is removed in between, so ``update`` returns
more keys than the mask has. In 5.15 only one token is removed after a draft, however many were rejected.

Fix: ``update`` returns the last keys and values, which the mask is for, as in 5.18. The layer keeps the others. In
5.15 all rejected tokens are removed, as in 5.16.

Remove when: transformers below 5.18.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F24", severity="crash", affected=">=5.15.0,<5.18.0", acts_on="every model", applied_upstream="pull/48280"
)

#: Tokens of a draft.
_DRAFT = 5


@PATCH.replaces("transformers.cache_utils", "DynamicSlidingWindowLayer.activate_past_recording", activator=True)
def activate_past_recording(original: Original, self: Any) -> Any:
    dormant.activate(PATCH.id)
    return original(self)


# A layer from before may record already.
@PATCH.replaces("transformers.cache_utils", "DynamicSlidingWindowLayer.update", dormant=lambda late: not late)
def update(original: Original, self: Any, key_states: Any, *args: Any, **kwargs: Any) -> Any:
    keys, values = original(self, key_states, *args, **kwargs)
    if not self.record_past:
        return keys, values
    visible = self.sliding_window - 1 + key_states.shape[-2]
    return keys[:, :, -visible:, :], values[:, :, -visible:, :]


@PATCH.replaces(
    "transformers.generation.candidate_generator",
    "AssistedCandidateGenerator._update_past_and_masks",
    affected=">=5.15.0,<5.16.0",
)
def update_past_and_masks(
    original: Original, self: Any, input_ids: Any, remove_from_pkv: int = 0, *args: Any, **kwargs: Any
) -> Any:
    cache = self.assistant_kwargs.get("past_key_values")
    rejected = 0 if cache is None else cache.get_seq_length() - (input_ids.shape[-1] - 1)
    return original(self, input_ids, remove_from_pkv + max(rejected, 0), *args, **kwargs)


def draft_always(model: Any) -> Any:
    """Have a draft model draft the same number of tokens each time, however confident it is."""
    config = model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = _DRAFT, "constant"
    config.assistant_confidence_threshold = 0.0
    return model


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    model, drafts = workspace.load().float(), draft_always(workspace.load().float())
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**options)
    same = expected.equal(model.generate(**options, assistant_model=drafts))
    return Outcome(not same, f"with a draft model, {'the same' if same else 'other'} tokens")
