"""An offload folder is used for the weights that are in it, and for no others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, find_meta_tensors
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.offload.accelerate_offload_folder import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"an offload folder of another model: logits differ by"


def dispatch(workspace: Any, model: Any, folder: Path, offload: str = "towers") -> Any:
    return tiny.dispatch(model, tiny.device_map(model, offload, main=workspace.main, offloaded="disk"), folder)


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_a_folder_with_the_same_weights_is_used_and_what_it_lacks_is_added(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, quantization: str | None
) -> None:
    dispatch(workspace, workspace.load(quantization), tmp_path)
    written = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")}
    assert written
    for offload in ("towers", "both"):
        model = dispatch(workspace, workspace.load(quantization), tmp_path, offload)
        assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    after = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")}
    assert {name: after[name] for name in written} == written
    assert len(after) > len(written)


def test_a_folder_with_other_weights_is_refused_and_nothing_is_moved(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path
) -> None:
    import torch

    first = dispatch(workspace, workspace.load(), tmp_path)
    other = workspace.load()
    with torch.no_grad():
        other.model.vision_tower.patch_embedder.input_proj.weight[0, 0] += 1  # one value of one weight
    expected = workspace.outputs(other)
    with pytest.raises(
        Gemma4CompatError, match=r"another model's weights: 'model\.vision_tower\S*input_proj\.weight'"
    ):
        dispatch(workspace, other, tmp_path)
    assert find_meta_tensors(other) == ()
    assert difference(expected, workspace.outputs(other)) == 0.0
    assert difference(one_device(None, None), workspace.outputs(first)) == 0.0, "whose folder it is goes on"


@pytest.mark.parametrize("below", [False, True], ids=["a file in its place", "a file above it"])
def test_a_folder_that_cannot_be_written_is_named_before_anything_is_moved(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, below: bool
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    folder = file / "weights" if below else file
    model = workspace.load()
    with pytest.raises(Gemma4CompatError, match=re.escape(f"the offload folder {str(folder)!r} cannot be written")):
        dispatch(workspace, model, folder)
    assert find_meta_tensors(model) == ()
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0


def test_a_file_that_was_cut_is_named_and_good_again_when_it_is_whole(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path
) -> None:
    model = dispatch(workspace, workspace.load(), tmp_path)
    file = next(tmp_path.glob("*input_proj.weight.dat"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-2])
    with pytest.raises(Gemma4CompatError, match=rf"'{re.escape(file.stem)}' cannot be read from the folder"):
        workspace.outputs(model)
    file.write_bytes(whole)
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
