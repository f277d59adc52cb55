"""transformers-qat-padding-row: one row of a quantized embedding is read where one is needed, wherever it is."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization.transformers_qat_padding_row import PATCH
from tests.patches.promise import Promise
from tests.patches.quantization import qat


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a forward dequantizes \d+ rows of the embedding for one of them"


@qat.needs_quantizer
@pytest.mark.parametrize("place", ["nowhere", "embedding"])
def test_a_model_that_is_given_embeddings_reads_them_all(workspace: Any, place: str) -> None:
    import torch

    model = qat.load(workspace.qat())
    ids = tiny.inputs(text_only=True)["input_ids"]
    if place == "embedding":
        model = workspace.dispatch_map(model, qat.layout(model, place))
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        assert torch.equal(model(input_ids=ids).logits, model(inputs_embeds=embeddings).logits)


@qat.needs_quantizer
def test_the_weight_is_the_whole_one_outside_a_forward(workspace: Any) -> None:
    import torch

    model = qat.load(workspace.qat())
    embedding = model.get_input_embeddings()
    expected = embedding.weight.clone()
    found = []
    # In the middle of a forward, another thread reads the weight.
    model.model.language_model.layers[0].register_forward_hook(lambda *_: found.append(_in_a_thread(embedding)))
    with torch.no_grad():
        model(**workspace.inputs())
    assert torch.equal(found[0], expected)
    split = workspace.dispatch_map(qat.load(workspace.qat()), qat.layout(model, "embedding"))
    assert torch.equal(split.get_input_embeddings().weight, expected)
    assert split.get_input_embeddings().embedding_quantized.device.type == "meta"


def _in_a_thread(embedding: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(embedding.weight))
    thread.start()
    thread.join()
    return found[0]


@qat.needs_quantizer
def test_compiled(workspace: Any) -> None:
    import torch

    model = qat.load(workspace.qat())
    batch = workspace.inputs(text_only=True)
    with torch.no_grad():
        expected = model(**batch).logits
        torch._dynamo.reset()
        found = torch.compile(model, backend="eager")(**batch).logits
    assert torch.equal(expected, found)


@qat.needs_quantizer
def test_after_an_exception_in_a_forward(workspace: Any) -> None:
    model = qat.load(workspace.qat())
    expected, whole = workspace.outputs(model), model.get_input_embeddings().weight.clone()
    handle = model.model.language_model.layers[1].register_forward_pre_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        workspace.outputs(model)
    handle.remove()
    assert model.get_input_embeddings().weight.equal(whole)
    assert difference(expected, workspace.outputs(model)) == 0.0


def _fail(*_: Any) -> None:
    raise ZeroDivisionError
