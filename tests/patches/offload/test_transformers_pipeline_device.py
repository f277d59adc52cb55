"""F37 for pipelines: where a pipeline of a split model puts its tensors."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat.patches.offload.transformers_pipeline_device import PATCH
from tests.one_device import modalities
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"device string: disk|the tensors go to"


def generated(model: Any) -> Any:
    from transformers import pipeline

    tokenizer = modalities.processor().tokenizer
    made = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert made.device == model.device
    return made("Hello", max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize("adapter", [None, "all"])
def test_it_generates_as_on_one_device_and_the_map_is_the_one_asked_for(workspace: Any, adapter: str | None) -> None:
    from peft import PeftModel

    reference, model = workspace.load(), workspace.load()
    placement = tiny.device_map(model, "both", main=workspace.main, offloaded="disk")
    assert next(iter(placement.values())) == "disk"
    model = workspace.dispatch_map(model, placement)
    if adapter is not None:
        reference, model = (PeftModel.from_pretrained(base, workspace.adapter(adapter)) for base in (reference, model))
    assert generated(model) == generated(reference)
    assert model.hf_device_map == placement


def test_a_device_beside_the_map_is_still_refused(workspace: Any) -> None:
    from transformers import pipeline

    model = workspace.split(offload="towers")
    with pytest.raises(ValueError, match="discard the `device` argument"):
        pipeline("text-generation", model=model, tokenizer=modalities.processor().tokenizer, device="cpu")
