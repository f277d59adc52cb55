"""Model inputs go to the device of the embedding, where they are compared with its rows.

Symptom: ``RuntimeError: Expected all tensors to be on the same device`` from a forward with ``inputs_embeds``, and
from ``generate`` with an assistant, of a model whose ``embed_tokens`` is on another device than its inputs. In early
releases (5.6.2 among them) from every forward of an E2B or E4B.

Cause: ``Gemma4Model.forward`` compares ``inputs_embeds`` with what the embedding returns for a placeholder, and puts
the row of the padding token there. ``Gemma4TextModel.get_per_layer_inputs`` compares them with the whole weight. An
assistant's input is a hidden state joined with an embedding. accelerate's main hook keeps inputs and outputs on the
main device; the embedding and its output are on the embedding's own. In early releases the mask of placeholders in
``input_ids`` also stays on the main device.

Fix: ``input_ids`` and ``inputs_embeds`` first go to the device of the embedding. An assistant gets embeddings where
its tokens are.

Remove when: all supported releases take ``inputs_embeds`` to the device of the embedding, and an assistant's
embeddings to that of the hidden state.
"""

import inspect
from typing import Any

from gemma4_compat._gemma4.accelerate import hooked, module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F81", severity="crash", affected=">=5.5.0", acts_on="every model", requires="accelerate")
PATCH.replaces(**hooked.ADD_HOOK)(hooked.activator(PATCH.id))

_INPUTS = ("input_ids", "inputs_embeds")


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.forward", dormant=hooked.no_hooks)
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedModel.forward", group="gemma4_unified")
def model_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(original, self, self.language_model.embed_tokens, args, kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.get_per_layer_inputs", dormant=hooked.no_hooks)
def get_per_layer_inputs(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(original, self, self.embed_tokens, args, kwargs)


def _called(original: Original, model: Any, embedding: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = module_hooks.hook_device(walk.innermost(embedding))
    if device is None:
        return original(model, *args, **kwargs)
    tensors = [value for value in (*args, *map(kwargs.get, _INPUTS)) if hasattr(value, "device")]
    if all(tensor.device == device for tensor in tensors):
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs)
    for name in _INPUTS:
        if given.arguments.get(name) is not None:
            given.arguments[name] = given.arguments[name].to(device)
    return original(*given.args, **given.kwargs)


# From 5.8.0 on.
@PATCH.replaces(
    "transformers.generation.candidate_generator", "SinglePositionMultiTokenCandidateGenerator.__init__", optional=True
)
def candidate_generator(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    embedding = self.target_model_input_embeddings
    if module_hooks.hook_device(walk.innermost(embedding)) is not None:
        self.target_model_input_embeddings = _OfTokens(embedding)


class _OfTokens:
    """Stands in for an embedding that an assistant calls; its output is on the device of the tokens."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    def __call__(self, tokens: Any) -> Any:
        return self._embedding(tokens).to(tokens.device)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.stand_ins import second_device

    workspace.needs_second_device()
    ids = tiny.inputs("cpu", text_only=True, variant=workspace.variant)["input_ids"]

    def of_embeddings(model: Any) -> Any:
        with torch.no_grad():
            return model(inputs_embeds=model.get_input_embeddings()(ids).cpu()).logits.float().cpu()

    whole = tiny.load(workspace.checkpoint)
    expected, logits = workspace.outputs(whole, device="cpu"), of_embeddings(whole)
    with second_device.second_device():
        there = ["model.language_model.embed_tokens", "lm_head"]
        model = tiny.dispatch_to_two(tiny.load(workspace.checkpoint), second_device.DEVICE, there)
        found = workspace.difference(expected, model, device="cpu")
        found = max(found, (of_embeddings(model) - logits).abs().max().item())
    return Outcome.of_parity(found, "an embedding on another device than the inputs")
