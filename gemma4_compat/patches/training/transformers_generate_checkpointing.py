"""``generate`` keeps its cache in training mode with gradient checkpointing.

Symptom: silent: after ``model.train()`` and ``model.gradient_checkpointing_enable()``, ``generate`` returns other
tokens than in ``eval()`` mode, because each new token sees only itself. This hits rollouts of your own training loop;
TRL turns checkpointing off for each. With a static cache it raises ``RuntimeError: output with shape ... doesn't match
the broadcast shape ...``. A forward under ``torch.no_grad()`` returns no cache.

Cause: Before transformers 5.24, ``GradientCheckpointingLayer`` drops the cache if it is in training mode and its flag
``gradient_checkpointing`` is set, and ``merge_with_config_defaults`` turns ``use_cache`` off for such a model. Neither
asks whether gradients are recorded: without them there is no backward pass that would run a layer again.

Fix: While gradients are off, the flags of layers and models read False, so both do what transformers 5.24 does. What
was set stays set, and ``is_gradient_checkpointing`` says so. With gradients on, nothing changes. This holds for every
model, also for those whose forward has a check of its own (GPT-2).

Remove when: no supported release is older than transformers 5.24.0.
"""

from typing import Any

from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat.patches.api import Detection, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F109",
    severity="wrong_result",
    affected=">=5.5,<5.24.0",
    applied_upstream="releases/tag/v5.24.0",
    acts_on="every model",
)


@PATCH.replaces("transformers.modeling_layers", f"GradientCheckpointingLayer.{checkpointing.FLAG}", attribute=True)
@PATCH.replaces("transformers.modeling_utils", f"PreTrainedModel.{checkpointing.FLAG}", attribute=True)
def flag(original: Original, self: Any) -> Any:
    found = original(self)
    if not found:
        return found
    import torch

    return found if torch.is_grad_enabled() else False


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel.is_gradient_checkpointing", affected="<5.23.0")
# Since 5.23.0.
@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel.is_activation_checkpointing", optional=True)
def is_checkpointing(original: Original, self: Any) -> Any:
    import torch

    with torch.enable_grad():  # it reads the flags
        return original(self)


def detect() -> Detection:
    return Detection.NOT_AFFECTED if checkpointing.asks_for_gradients() else Detection.AFFECTED


def reproduce(workspace: Workspace) -> Outcome:
    """Greedy tokens and logits, and the cache of a forward, against those of ``eval()`` mode."""
    import torch

    model = workspace.load()
    batch = workspace.inputs(text_only=True)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**batch, **options)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = model.generate(**batch, **options)
    off = max((one - other).abs().max().item() for one, other in zip(expected.logits, found.logits, strict=True))
    if off or not torch.equal(expected.sequences, found.sequences):
        return Outcome(True, f"with checkpointing in training mode the logits of generate are off by {off:.3g}", off)
    with torch.no_grad():
        output = model(**batch, use_cache=True)
    if all(output.get(name) is None for name in ("cache", "past_key_values")):  # its name, by release
        return Outcome(True, "with checkpointing in training mode a forward without gradients returns no cache")
    return Outcome(
        False, f"with checkpointing in training mode, {len(found.logits)} tokens have the bits of eval()", off
    )
