"""E2B and E4B accept ``inputs_embeds`` and find the per-layer embeddings of their tokens.

Symptom: ``RuntimeError: It seems like you tried to call `forward` from `inputs_embeds` without providing `input_ids`,
and that the `inputs_embeds` you provided do not exactly match the embedding weights`` although the embeddings do
match, or ``OutOfMemoryError``: 128 tokens of E2B take 48 GiB.

Cause: ``Gemma4TextModel.get_per_layer_inputs`` searches for each embedding among the rows of the weight times the root
of the width. But the embedding multiplies by that root in the dtype of the weight, where the root is rounded: 39.25
instead of 39.19 for E2B. The row of the padding token, which stands for images, is not multiplied at all. All rows are
compared with all embeddings at once. ``generate`` with ``input_ids`` and ``inputs_embeds`` drops the ids, and passes
``per_layer_inputs`` on to ``Gemma4ForCausalLM`` for the second token, which has ids.

Fix: The embeddings are compared with what the embedding module returns, a part of it at a time. ``generate`` uses
tokens that are passed beside them, which also works for embeddings that match no token, and uses ``per_layer_inputs``
for the prompt.

Remove when: transformers finds the tokens of what ``embed_tokens`` returns, in memory that does not grow with prompt
times vocabulary, in all supported releases.
"""

from typing import Any

from gemma4_compat._gemma4.models import per_layer
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F93",
    severity="crash",
    affected=">=5.5.0",
    after="transformers-offloaded-embedding transformers-embedding-devices transformers-static-images",
    needs="transformers-given-per-layer",
)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.get_per_layer_inputs")
def get_per_layer_inputs(
    original: Original, self: Any, input_ids: Any, inputs_embeds: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if input_ids is None and inputs_embeds is not None and self.hidden_size_per_layer_input:
        input_ids = per_layer.tokens_of(self, inputs_embeds)
    return original(self, input_ids, inputs_embeds, *args, **kwargs)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin.prepare_inputs_for_generation", group="generate")
def prepare_inputs(original: Original, self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = original(self, input_ids, *args, **kwargs)
    if "per_layer_inputs" not in inputs and ("inputs_embeds" not in inputs or inputs["inputs_embeds"] is None):
        return inputs  # most tokens
    if not is_gemma4_config(self.config) or per_layer.text_model(self) is None:
        return inputs
    embeds, whole = inputs.get("inputs_embeds"), kwargs.get("inputs_embeds")
    if embeds is None:  # the second token and later ones
        inputs.pop("per_layer_inputs", None)
        return inputs
    length = embeds.shape[1]  # of the whole prompt, or what a cache does not hold yet
    if (given := inputs.get("per_layer_inputs")) is not None:
        inputs["per_layer_inputs"] = given[:, -length:]
    elif whole is not None and input_ids is not None and input_ids.shape == whole.shape[:2]:
        inputs["per_layer_inputs"] = per_layer.known_inputs(self, input_ids[:, -length:], embeds)
    return inputs


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny, tiny_models

    workspace.needs("per_layer_embeddings")
    variant = {} if workspace.variant is None else {"variant": workspace.variant}
    model = tiny.load(workspace.cached(tiny_models.build_checkpoint, width=96, **variant), device=workspace.main)
    found = 0.0
    for batch in (workspace.inputs(text_only=True), workspace.inputs()):
        others = {name: value for name, value in batch.items() if name != "input_ids"}
        with torch.no_grad():
            expected = model(**batch).logits
            embeds = model.get_input_embeddings()(batch["input_ids"])
            found = max(found, (model(inputs_embeds=embeds, **others).logits - expected).abs().max().item())
    if found:
        return Outcome(True, f"the logits of inputs_embeds are {found:.2g} off those of input_ids", found)
    return Outcome(False, "inputs_embeds have the logits of input_ids, bit for bit", 0.0)
