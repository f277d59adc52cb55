"""The MLPs of a Gemma 4 model can be computed in chunks in training, without the intermediates of all tokens.

Symptom: silent: training on long texts ends in ``torch.OutOfMemoryError`` although gradient checkpointing is on and
the loss is in chunks. While a layer is computed again, gate, activation, product and their gradients of all tokens
exist at once. On an H100, a step of 16,384 tokens of a streamed E2B takes 7.8 GiB, and 6.2 with chunks.

Cause: ``Gemma4TextMLP.forward`` computes all tokens in one call, and autograd keeps every intermediate of it until the
backward pass. They are 4 times as wide as the hidden states, 8 times in KV-shared layers of the E2B.

Fix: After ``gemma4_compat.train_fast(model)`` where memory is short, or with ``mlp=True``, or for all models with
``GEMMA4_COMPAT_ENABLE=transformers-chunked-mlp``, an MLP in training keeps its inputs and computes a chunk of 2,048
tokens at a time; the backward pass computes each chunk again. It is opt-in, because it takes one more forward of the
MLPs, and because a matrix product of fewer rows may round differently.
Norms of text layers then keep their 16-bit inputs instead of float32 copies. Two results that nothing uses are not
computed: the graph of shared keys and values that checkpointing recomputes, and the gradient that reaches embeddings
through per-layer inputs. The loss and the gradients of weights keep their bits.

Remove when: transformers computes the MLPs of Gemma 4 in chunks in training.
"""

from typing import Any

from gemma4_compat._engine import settings
from gemma4_compat._training import mlp
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F110", severity="memory", affected=">=5.5")


def _is_off(late: bool) -> bool:
    return not settings.is_enabled(mlp.ID)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.forward", group="gemma4", dormant=_is_off)
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedTextModel.forward", group="gemma4_unified", dormant=_is_off)
def text_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.training and settings.is_enabled(mlp.ID):
        mlp.ask_once(self)
    return original(self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    """How much of an MLP's intermediates the backward pass keeps if chunks were requested."""
    import torch

    model = workspace.load_text().train()
    mlp.ask(model, tokens=4)
    layer = model.model.layers[0].mlp
    inputs = torch.zeros(1, 16, layer.hidden_size, dtype=model.dtype, device=workspace.main, requires_grad=True)
    kept = 0

    def keep(tensor: Any) -> Any:
        nonlocal kept
        kept += tensor.nbytes if tensor.shape[-1] == layer.intermediate_size and tensor.shape[-2] == 16 else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(inputs)
    whole = 16 * layer.intermediate_size * inputs.itemsize
    return Outcome(kept > 0, f"the backward pass keeps {kept / whole:.0f} intermediates of all tokens of an MLP")
