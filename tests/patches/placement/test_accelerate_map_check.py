"""F26, F27 and bad maps, for ``dispatch_model``: said before anything is moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.placement.accelerate_map_check import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the entry is ignored"
    exact = False


def placement(workspace: Any, model: Any) -> dict[str, Any]:
    return tiny.device_map(model, "towers", main=workspace.main, offloaded=workspace.offloaded)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lm_head": "cuda:99"}, r"'lm_head' on 'cuda:99': this machine has"),
        ({"lm_head": 99}, r"'lm_head' on 99: this machine has"),
        ({"lm_head": "dsik"}, r"'lm_head' on 'dsik': no such device"),
        ({"": -1}, r"'the model' on -1: this machine has"),
        ({"model.vision_tower": None}, r"no device for model\.vision_tower\. Add entries"),
        ({"model.language_model.layers.2": None}, r"no device for model\.language_model\.layers\.2\. Add"),
    ],
)
def test_a_map_that_cannot_work_is_one_error_and_nothing_is_moved(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    from accelerate import dispatch_model

    model = workspace.load()
    asked = {**placement(workspace, model), **change}
    asked = {name: device for name, device in asked.items() if device is not None}
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=message):
        dispatch_model(model, asked, offload_dir=tmp_path)
    assert not hasattr(model, "_hf_hook")
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


def test_transformers_name_of_the_offload_folder(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path
) -> None:
    from accelerate import dispatch_model

    model = workspace.load()
    asked = tiny.device_map(model, "towers", main=workspace.main, offloaded="disk")
    with pytest.warns(gemma4_compat.Gemma4CompatWarning, match="without gemma4_compat.* is a TypeError") as caught:
        dispatch_model(model, asked, offload_folder=tmp_path)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert list(tmp_path.glob("*.dat"))
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("options", [{}, {"offload_dir": None}, {"offload_dir": "same"}], ids=str)
def test_both_names_of_one_folder(workspace: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    from accelerate import dispatch_model

    options = {name: value and str(tmp_path) for name, value in options.items()}
    model = workspace.load()
    asked = tiny.device_map(model, "towers", main=workspace.main, offloaded="disk")
    with pytest.warns(gemma4_compat.Gemma4CompatWarning, match="Write offload_dir"):
        dispatch_model(model, asked, offload_folder=tmp_path, **options)
    assert list(tmp_path.glob("*.dat"))


@pytest.mark.parametrize("positional", [False, True])
def test_two_folders_are_one_error_and_nothing_is_moved(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, positional: bool
) -> None:
    from accelerate import dispatch_model

    model = workspace.load()
    asked = tiny.device_map(model, "towers", main=workspace.main, offloaded="disk")
    given = (None, None, tmp_path / "one") if positional else ()
    options: dict[str, Any] = {} if positional else {"offload_dir": tmp_path / "one"}
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"offload_dir='.*one' and offload_folder='.*other'"):
        dispatch_model(model, asked, *given, offload_folder=str(tmp_path / "other"), **options)
    assert not list(tmp_path.iterdir())
    assert not hasattr(model, "_hf_hook")
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


def test_of_another_model_the_other_name_is_upstreams_error(tmp_path: Path) -> None:
    import torch
    from accelerate import dispatch_model

    with pytest.raises(TypeError, match="unexpected keyword argument 'offload_folder'"):
        dispatch_model(torch.nn.Linear(2, 2), {"": "disk"}, offload_folder=tmp_path)


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match")
def test_entries_that_match_nothing_have_no_effect_but_one_warning(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path
) -> None:
    from accelerate import dispatch_model

    model = workspace.load()
    asked = {**placement(workspace, model), "model.layers.3": "disk", "multi_modal_projector": "disk"}
    with pytest.warns(gemma4_compat.Gemma4CompatWarning, match="these entries have no effect") as caught:
        dispatch_model(model, asked, offload_dir=tmp_path)
    ours = [str(w.message) for w in caught if w.category is gemma4_compat.Gemma4CompatWarning]
    assert len(ours) == 1
    assert {w.filename for w in caught if str(w.message) in ours} == {__file__}
    assert "'model.layers.3' (nearest: model.language_model.layers.3" in ours[0]
    assert "'multi_modal_projector' (nearest: model.embed_vision, model.embed_audio)" in ours[0]
    assert model.hf_device_map == asked
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize(
    "written, meant",
    [
        ("model.vision_model", "model.vision_tower"),
        ("vision_tower.encoder.layers.1", "model.vision_tower.encoder.layers.1"),
        ("model.audio_model", "model.audio_tower"),
        ("model.text_model", "model.language_model"),
        ("model.embed_tokens", "model.language_model.embed_tokens"),
        ("lm_heads", "lm_head"),
    ],
)
def test_the_nearest_module(workspace: Any, written: str, meant: str) -> None:
    assert device_maps.nearest(workspace.load(), written)[0] == meant
