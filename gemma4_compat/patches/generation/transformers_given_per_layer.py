"""``Gemma4ForConditionalGeneration`` accepts ``per_layer_inputs`` together with ``inputs_embeds``.

Symptom: ``TypeError: Gemma4TextModel got multiple values for keyword argument 'per_layer_inputs'`` from a forward with
both.

Cause: ``Gemma4Model.forward`` always searches for the tokens of the embeddings, and passes the given
``per_layer_inputs`` on to the text model beside the ones it has found.

Fix: The given ones are used instead of the search.

Remove when: transformers below 5.9.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.models import per_layer
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F93",
    severity="crash",
    affected=">=5.5.0,<5.9.0",
    applied_upstream="releases/tag/v5.9.0",
    after="transformers-embedding-search transformers-offloaded-embedding transformers-embedding-devices",
)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.forward")
def model_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("inputs_embeds") is None or kwargs.get("per_layer_inputs") is None:
        return original(self, *args, **kwargs)
    with per_layer.handed_over(kwargs.pop("per_layer_inputs")):
        return original(self, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.get_per_layer_inputs")
def get_per_layer_inputs(original: Original, self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    given = per_layer.given() if input_ids is None else None
    return original(self, input_ids, *args, **kwargs) if given is None else given


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    workspace.needs("per_layer_embeddings")
    batch = workspace.inputs(text_only=True)
    model = workspace.load()
    others = {name: value for name, value in batch.items() if name != "input_ids"}
    with torch.no_grad():
        expected = model(**batch).logits
        others["per_layer_inputs"] = model.model.language_model.get_per_layer_inputs(batch["input_ids"], None)
        embeds = model.get_input_embeddings()(batch["input_ids"])
        found = (model(inputs_embeds=embeds, **others).logits - expected).abs().max().item()
    if found:
        return Outcome(True, f"the logits of both are {found:.2g} off those of input_ids", found)
    return Outcome(False, "inputs_embeds and per_layer_inputs have the logits of input_ids, bit for bit", 0.0)
