"""``output_attentions=True`` returns attentions with ``sdpa``, flex and flash attention too.

Symptom: silent: with the default attention, ``output_attentions=True`` returns ``attentions=()``, from a forward and
for each token of ``generate``. Flex attention on a GPU returns sums of exponentials, one number for each query, as if
they were weights.

Cause: Kernels return no weights. ``capture_outputs`` collects what attention layers return beside their output, and
passes over None. Only ``config.output_attentions = True`` is refused with such an attention.

Fix: While attentions are collected, the layers of a Gemma 4, also those of its vision tower and its draft models,
compute their weights beside the kernel, with the function for ``eager``. The output is still the kernel's, so logits
keep their bits; the weights are those of ``eager`` up to rounding, without dropout. They take the memory that
``eager`` takes: a number for each pair of tokens. Inside gradient checkpointing they have no gradient.

Remove when: transformers returns the weights, or an error, when it is asked for those of ``sdpa``.
"""

from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat._gemma4.attention import weights
from gemma4_compat._gemma4.state import capturing
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F123",
    severity="wrong_result",
    affected=">=5.5.0",
    after="transformers-sliding-windows transformers-flash-attention",  # whose functions return no weights
)


@PATCH.replaces("transformers.modeling_utils", "AttentionInterface.__getitem__", affected="<5.7.0", dormant=True)
@PATCH.replaces("transformers.modeling_utils", "AttentionInterface.get_interface", affected=">=5.7.0", dormant=True)
def attention_function(original: Original, self: Any, key: str | None, *default: Any) -> Any:
    found = original(self, key, *default)
    return weights.over(found) if key != "eager" and "attentions" in capturing.collected() else found


@PATCH.replaces(capturing.MODULE, "maybe_install_capturing_hooks", activator=True)
def asked(original: Original, model: Any) -> Any:
    """Called where something is to be collected: from then on layers look whether it is their weights."""
    if str(model.config.model_type).startswith("gemma4"):
        dormant.activate(PATCH.id)
    return original(model)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    model, batch = workspace.load(), workspace.inputs(text_only=True)
    layers = model.config.get_text_config().num_hidden_layers
    with torch.no_grad():
        expected = model(**batch)
        found = model(**batch, output_attentions=True)
    off = (expected.logits - found.logits).abs().max().item()
    got = found.attentions or ()
    if len(got) != layers:
        return Outcome(True, f"{len(got)} tensors of attention weights for {layers} layers")
    return Outcome(off > 0, f"the weights of {layers} layers; the logits are off by {off:.2g}", off)
