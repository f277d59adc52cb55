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

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._accelerate import hooked, module_hooks
from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target
from gemma4_compat._models import walk

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_INPUTS = ("input_ids", "inputs_embeds")


def model_forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(original, self, self.language_model.embed_tokens, args, kwargs)


def get_per_layer_inputs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(original, self, self.embed_tokens, args, kwargs)


def _called(original: Callable[..., Any], model: Any, embedding: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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


def candidate_generator(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
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

    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.workspace import difference
    from gemma4_compat._stand_ins import second_device

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
        found = difference(expected, workspace.outputs(model, device="cpu"))
        found = max(found, (of_embeddings(model) - logits).abs().max().item())
    return Outcome.of_parity(found, "an embedding on another device than the inputs")


_MODELING = "transformers.models.gemma4.modeling_gemma4"

_ID = "transformers-embedding-devices"

PATCH = Patch(
    id=_ID,
    kind=Kind.REPAIR,
    severity=Severity.CRASH,
    failure_points=("F81",),
    distribution="transformers",
    affected=">=5.5.0",
    acts_on=ActsOn.EVERY_MODEL,
    requires=("accelerate",),
    targets=(
        hooked.activator(_ID),
        Target(module=_MODELING, name="Gemma4Model.forward", replacement=model_forward, dormant=hooked.no_hooks),
        Target(
            module=_MODELING,
            name="Gemma4TextModel.get_per_layer_inputs",
            replacement=get_per_layer_inputs,
            dormant=hooked.no_hooks,
        ),
        Target(
            module="transformers.models.gemma4_unified.modeling_gemma4_unified",
            name="Gemma4UnifiedModel.forward",
            replacement=model_forward,
            group="gemma4_unified",
        ),
        Target(
            module="transformers.generation.candidate_generator",
            name="SinglePositionMultiTokenCandidateGenerator.__init__",
            replacement=candidate_generator,
            optional=True,  # from 5.8.0 on
        ),
    ),
    reproduce=reproduce,
)
