"""transformers-embedding-devices: an embedding on another device than what the model is given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat.patches.placement import transformers_embedding_devices
from gemma4_compat.patches.placement.transformers_embedding_devices import PATCH
from tests.helpers import Finished
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: Expected all tensors to be on the same device"


def embedding(device: str | None) -> Any:
    torch = pytest.importorskip("torch")
    made = torch.nn.Embedding(2, 2)
    if device is not None:
        made._hf_hook = SimpleNamespace(execution_device=device)
    return made


@pytest.mark.parametrize("device", [None, "cpu"])
def test_what_is_on_that_device_is_given_to_upstream_as_it_is(device: str | None) -> None:
    torch = pytest.importorskip("torch")
    seen: list[Any] = []
    ids, embeds = torch.tensor([[1]]), torch.ones(1, 1, 2)
    text = SimpleNamespace(embed_tokens=embedding(device))
    model = SimpleNamespace(language_model=text)
    transformers_embedding_devices.model_forward(lambda *given, **named: seen.append((given, named)), model, ids, a=1)
    transformers_embedding_devices.get_per_layer_inputs(lambda *given: seen.append(given), text, None, embeds)
    (((first, given), named), (second, nothing, other)) = seen
    assert (first, second, nothing, named) == (model, text, None, {"a": 1})
    assert given is ids
    assert other is embeds


def test_on_another_device_only_what_is_embedded_is_moved() -> None:
    torch = pytest.importorskip("torch")
    seen: dict[str, Any] = {}

    def original(
        self: Any, input_ids: Any = None, pixels: Any = None, inputs_embeds: Any = None, **others: Any
    ) -> None:
        seen.update(input_ids=input_ids, pixels=pixels, inputs_embeds=inputs_embeds, **others)

    model = SimpleNamespace(language_model=SimpleNamespace(embed_tokens=embedding("meta")))
    here = torch.ones(1)
    transformers_embedding_devices.model_forward(original, model, None, here, inputs_embeds=here, mask=here)
    assert seen["inputs_embeds"].device.type == "meta"
    assert (seen["input_ids"], seen["pixels"], seen["mask"]) == (None, here, here)
    transformers_embedding_devices.model_forward(original, model, here)
    assert (seen["input_ids"].device.type, seen["inputs_embeds"]) == ("meta", None)


def test_an_assistant_gets_embeddings_where_its_tokens_are() -> None:
    torch = pytest.importorskip("torch")
    for device, kept in ((None, True), ("cpu", False)):
        given = embedding(device)
        generator = SimpleNamespace(target_model_input_embeddings=None)

        def original(self: Any, table: Any) -> None:
            self.target_model_input_embeddings = table

        transformers_embedding_devices.candidate_generator(original, generator, given)
        found = generator.target_model_input_embeddings
        assert (found is given) == kept
        assert torch.equal(found(torch.tensor([1])), given(torch.tensor([1])))


#: Against one device: what a multimodal model, one of text alone and an assistant make of an embedding elsewhere.
_TWO_DEVICES = """
import gemma4_compat
import sys
from pathlib import Path
import torch
from accelerate import dispatch_model
from gemma4_compat._lab import tiny
from gemma4_compat._lab.stand_ins import second_device
from gemma4_compat._lab.workspace import Workspace

workspace = Workspace(Path(sys.argv[1]))
main = torch.device("cpu")
ids = tiny.inputs("cpu", text_only=True)["input_ids"]

def answers(model, assistant):
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids).to(main)
        found = [model(inputs_embeds=embeds).logits, model(ids).logits]
        options = {"max_new_tokens": 6, "do_sample": False}
        if sys.argv[2] == "text":
            found.append(model.generate(inputs_embeds=embeds, attention_mask=torch.ones_like(ids), **options))
        found.append(model.generate(ids, assistant_model=assistant, **options))
    assert {tensor.device for tensor in found} == {main}
    return found

load = workspace.load_text if sys.argv[2] == "text" else workspace.load
try:
    assistant = workspace.load_assistant()
except ImportError:
    assistant = None
expected = answers(load(), assistant)
with second_device.second_device():
    model, second = load(), torch.device(second_device.DEVICE)
    names = [name for name, _ in model.named_parameters()]
    placement = {name: second if "embed_tokens." in name or "lm_head" in name else main for name in names}
    placement |= {name: main for name, _ in model.named_buffers()} | {"lm_head.weight": second}
    dispatch_model(model, placement, main_device=main, skip_keys=tiny.skip_keys(model))
    for mine, theirs in zip(answers(model, assistant), expected, strict=True):
        assert torch.equal(mine, theirs)
print("as on one device")
"""


@pytest.mark.parametrize("kind", ["multimodal", "text"])
def test_embeddings_and_an_assistant_as_on_one_device(
    workspace: Any, warm_child: Callable[..., Finished], kind: str
) -> None:
    pytest.importorskip("torch")
    from gemma4_compat._lab.stand_ins import second_device

    if not second_device.available():
        pytest.skip("this PyTorch takes no backend in Python")
    done = warm_child("-c", _TWO_DEVICES, str(workspace.folder), kind)
    assert done.stdout.endswith("as on one device\n"), done.stderr[-3000:]
