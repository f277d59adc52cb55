"""F90: a cast leaves the frequencies of rotary embeddings as they are, whichever call makes it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import Workspace, difference
from gemma4_compat.patches.training.transformers_rotary_cast import PATCH
from tests.helpers import without
from tests.patches.placement import splits
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a model after a cast to the dtype that it has: logits differ by"


def frequencies(model: Any) -> dict[str, Any]:
    return {name: value for name, value in model.named_buffers() if name.endswith("inv_freq")}


def bits(model: Any) -> dict[str, tuple[str, bytes]]:
    found = {name: (str(value.dtype), value.numpy().tobytes()) for name, value in frequencies(model).items()}
    assert {dtype for dtype, _ in found.values()} == {"torch.float32"}
    return found


CASTS: dict[str, Callable[[Any], Any]] = {
    "to(dtype)": lambda model: model.to(model.dtype),
    "to(dtype=)": lambda model: model.to(dtype=model.dtype),
    "to(device, dtype)": lambda model: model.to("cpu", model.dtype),
    "bfloat16()": lambda model: model.bfloat16(),
    "half() and back": lambda model: model.half().bfloat16(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("variant", [None, *variants.NAMES])
def test_a_cast_to_the_dtype_that_a_model_has_changes_nothing(tmp_path: Path, variant: str | None, cast: str) -> None:
    try:
        workspace = Workspace.build(tmp_path / "workspace", variant)
    except gemma4_compat.Gemma4CompatError:
        pytest.skip("this transformers has no such variant")
    model = workspace.load()
    expected, before = workspace.outputs(model), bits(model)
    model = CASTS[cast](model)
    assert bits(model) == before
    if "half" not in cast:  # which rounds weights
        assert difference(expected, workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_it_is_the_model_that_loading_makes(workspace: Any, dtype: str) -> None:
    import torch

    wanted = getattr(torch, dtype)
    cast = workspace.load_text().to(wanted)
    loaded = loaded_text(workspace, wanted)
    assert bits(cast) == bits(loaded)


def loaded_text(workspace: Any, dtype: Any) -> Any:
    import transformers

    checkpoint = workspace.cached(workspace._text_copy)
    kind = getattr(transformers, tiny_models.class_name(checkpoint, text_only=True))
    return kind.from_pretrained(checkpoint, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wider_casts_are_upstreams(workspace: Any, dtype: str) -> None:
    import torch

    found = frequencies(workspace.load().to(getattr(torch, dtype)))
    with without(PATCH.id):
        expected = frequencies(workspace.load().to(getattr(torch, dtype)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert {value.dtype for value in found.values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("kind", ["ram", "disk"])
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_split_models(workspace: Any, tmp_path: Path, kind: str, quantization: str | None) -> None:
    """The text model's embedding is with the first layers, and the vision tower's goes with the tower."""
    model = workspace.load(quantization)
    expected = workspace.outputs(model)
    parts = ["model.vision_tower", "model.language_model.layers.0", "model.language_model.rotary_emb"]
    model = splits.split(workspace, kind, parts, tmp_path, model=model)
    assert difference(expected, workspace.outputs(model)) == 0.0
    for module in model.modules():
        module._apply(lambda value: value.bfloat16() if value.is_floating_point() else value, recurse=False)
    assert difference(expected, workspace.outputs(model)) == 0.0


def test_offloaded_buffers(workspace: Any, tmp_path: Path) -> None:
    """Those on meta keep their dtype, in which they are stored."""
    from accelerate import dispatch_model

    model = workspace.load()
    expected = workspace.outputs(model)
    placement = tiny.device_map(model, "layers", main="cpu", offloaded="disk")
    placement |= {"model.language_model.rotary_emb": "disk"}
    model = dispatch_model(
        model, placement, offload_dir=tmp_path, offload_buffers=True, skip_keys=tiny.skip_keys(model)
    )
    rotary = model.model.language_model.rotary_emb
    rotary.bfloat16()
    assert {value.dtype.itemsize for value in rotary.buffers()} == {4}
    assert difference(expected, workspace.outputs(model)) == 0.0


def test_an_adapted_model_and_the_trainer(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import Trainer, TrainingArguments

    model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("language"), autocast_adapter_dtype=False)
    expected, before = workspace.outputs(model.eval()), bits(model)
    batch = {name: value.cpu()[0] for name, value in workspace.inputs(text_only=True).items()}
    arguments = TrainingArguments(str(tmp_path), bf16_full_eval=True, use_cpu=True, report_to=[])
    Trainer(model, arguments, eval_dataset=[{**batch, "labels": batch["input_ids"]}]).evaluate()
    assert bits(model) == before
    assert difference(expected, workspace.outputs(model.eval())) == 0.0


def test_copies_keep_it_and_pickles_have_no_trace_of_it(workspace: Any) -> None:
    model = workspace.load()
    before = bits(model)
    assert bits(copy.deepcopy(model).bfloat16()) == before
    pickled = pickle.dumps(model.model.language_model.rotary_emb)
    assert b"gemma4_compat" not in pickled
    assert bits(pickle.loads(pickled)) == bits(model.model.language_model.rotary_emb)


def test_undone_a_model_that_is_there_is_upstreams_again(workspace: Any) -> None:
    model = workspace.load()
    with without(PATCH.id):
        assert {str(value.dtype) for value in frequencies(model.bfloat16()).values()} == {"torch.bfloat16"}


def test_a_move_and_an_empty_model_are_left_to_upstream(workspace: Any) -> None:
    import torch

    model = workspace.load()
    meta = copy.deepcopy(model).to("meta")
    assert {value.device.type for value in frequencies(meta).values()} == {"meta"}
    both = copy.deepcopy(model).to("meta", torch.float16)
    assert {(value.device.type, value.dtype) for value in frequencies(both).values()} == {("meta", torch.float32)}
    assert {value.device.type for value in frequencies(meta.to_empty(device="cpu")).values()} == {"cpu"}
