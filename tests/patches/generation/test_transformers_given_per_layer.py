"""transformers-given-per-layer: per-layer inputs of the caller's, before transformers 5.9.0."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._gemma4.models import per_layer
from gemma4_compat.patches.generation.transformers_given_per_layer import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"TypeError: .*got multiple values for keyword argument 'per_layer_inputs'"


def test_they_are_those_that_are_used(workspace: Any) -> None:
    import torch

    model, batch = workspace.load(), workspace.inputs()
    others = {name: value for name, value in batch.items() if name != "input_ids"}
    embeds = model.get_input_embeddings()(batch["input_ids"])
    inputs = per_layer.inputs_of(model, batch["input_ids"])
    with torch.no_grad():
        expected = model(**batch).logits
        assert torch.equal(model(inputs_embeds=embeds, per_layer_inputs=inputs, **others).logits, expected)
        assert not torch.equal(model(inputs_embeds=embeds, per_layer_inputs=2 * inputs, **others).logits, expected)
    assert per_layer.given() is None


def test_beside_tokens_they_are_an_error_still(workspace: Any) -> None:
    model, batch = workspace.load(), workspace.inputs()
    with pytest.raises((ValueError, TypeError), match="per_layer_inputs"):
        model(**batch, per_layer_inputs=per_layer.inputs_of(model, batch["input_ids"]))
