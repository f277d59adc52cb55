"""The loss of a Gemma 4 model can be computed in chunks, without the logits of all tokens.

Symptom: silent: with ``labels``, a forward and backward pass needs 3.25 times the memory of the logits of all tokens:
3.2 GiB for 2,048 tokens over a vocabulary of 262,144 in bfloat16, beside an E2B of 1.66 GiB in 4 bits. On a small card
the loss is what ends in ``torch.OutOfMemoryError``.

Cause: ``forward`` computes logits of every token, divides them, takes their tanh, multiplies them and casts them to
float32, and autograd keeps most of these tensors until the backward pass.

Fix: For models given to ``gemma4_compat.train_fast``, or all of them with
``GEMMA4_COMPAT_ENABLE=transformers-chunked-loss``, a forward with labels calls the model without its head. It then
runs head, soft cap and cross entropy for a few hundred tokens at a time, each with its gradient. ``outputs.logits`` is
None. It is opt-in, because a matrix product of fewer rows may round differently, and code that reads logits gets none.

Remove when: transformers itself computes the loss of Gemma 4 in chunks.
"""

from typing import Any

from gemma4_compat._training import loss
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F57", severity="memory", affected=">=5.5")


@PATCH.replaces(MODELING_GEMMA4, "Gemma4ForCausalLM.forward", group="gemma4")
@PATCH.replaces(MODELING_GEMMA4, "Gemma4ForConditionalGeneration.forward", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedForCausalLM.forward", group="gemma4_unified")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedForConditionalGeneration.forward", group="gemma4_unified")
def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not (self.training or loss.ATTRIBUTE in self.__dict__):
        return original(self, *args, **kwargs)
    return loss.forward(original, self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    """How much of the logits the backward pass keeps if a loss in chunks was requested."""
    import torch

    model = workspace.load().train().requires_grad_(False)
    loss.ask(model)
    batch = workspace.inputs(text_only=True)
    text = model.config.get_text_config()
    states = torch.zeros(*batch["input_ids"].shape, text.hidden_size, dtype=model.dtype, device=workspace.main)
    model.model.register_forward_hook(lambda *call: _with_states(call[-1], states))
    kept = 0

    def keep(tensor: Any) -> Any:
        nonlocal kept
        kept += tensor.nbytes if tensor.numel() >= states.shape[1] * text.vocab_size else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(**batch, labels=batch["input_ids"])
    logits = states.shape[1] * text.vocab_size * states.itemsize
    return Outcome(
        outputs.logits is not None, f"the backward pass keeps {kept / logits:.2f} times the bytes of all logits"
    )


def _with_states(outputs: Any, states: Any) -> Any:
    outputs.last_hidden_state = states.requires_grad_()  # the first gradient comes from the head
    return outputs
