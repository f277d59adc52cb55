"""F65, F15: a tied weight on disk, loaded by accelerate, has a file under each of its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.offload import accelerate_load_tied
from gemma4_compat.patches.offload.accelerate_load_tied import PATCH
from tests.patches.offload.test_accelerate_disk_buffers import loaded, skip_unless_it_dispatches
from tests.patches.promise import Promise

EMBEDDING = "model.language_model.embed_tokens"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"lm_head\.weight|weight is on the meta device|on the expected device"


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param({"": "disk"}, id="everything"),
        pytest.param({"": "disk", "lm_head": "cpu"}, id="all but the head"),
        pytest.param({"": "disk", EMBEDDING: "cpu"}, id="all but the embedding"),
    ],
)
def test_tied_weights_on_disk_answer_like_one_device(
    workspace: Any, tmp_path: Path, placement: dict[str, str], dtype: str | None
) -> None:
    if workspace.main != "cpu":
        pytest.skip("maps for a CPU and a disk")
    skip_unless_it_dispatches(placement)
    options = {} if dtype is None else {"dtype": dtype}
    reference = workspace.outputs(loaded(workspace.checkpoint, {"": "cpu"}, tmp_path / "one", **options))
    model = loaded(workspace.checkpoint, placement, tmp_path / "split", **options)
    assert difference(reference, workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("links", [True, False])
def test_the_folder_holds_the_weight_once_where_it_can(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:

        def refused(*args: Any) -> None:
            raise OSError("no hard links here")

        monkeypatch.setattr(accelerate_load_tied.os, "link", refused)
    for _ in range(2):  # the same folder again
        loaded(workspace.checkpoint, {"": "disk", "model.vision_tower": "cpu"}, tmp_path)
    first, second = (tmp_path / f"{name}.weight.dat" for name in (EMBEDDING, "lm_head"))
    assert first.samefile(second) == links
    assert first.read_bytes() == second.read_bytes()
    index = json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))
    assert index["lm_head.weight"] == index[f"{EMBEDDING}.weight"]


@pytest.mark.parametrize("placement", [{"": "cpu"}, {"": "disk"}, {"": "disk", "lm_head": "cpu"}])
def test_a_model_that_was_built_with_weights_gets_those_of_the_checkpoint(
    workspace: Any, tmp_path: Path, placement: dict[str, str]
) -> None:
    if workspace.main != "cpu":
        pytest.skip("maps for a CPU and a disk")
    skip_unless_it_dispatches(placement)
    from accelerate import load_checkpoint_and_dispatch

    reference = loaded(workspace.checkpoint, {"": "cpu"}, tmp_path / "one")
    model = type(reference)(reference.config).to(reference.dtype)
    for name, buffer in reference.named_buffers():
        model.get_buffer(name).data = buffer.clone()  # those that no checkpoint has
    load_checkpoint_and_dispatch(
        model, str(workspace.checkpoint), device_map=placement, offload_folder=str(tmp_path / "split")
    )
    assert difference(workspace.outputs(reference), workspace.outputs(model.eval())) == 0.0


def test_a_weight_that_the_checkpoint_lacks_is_as_before(tmp_path: Path) -> None:
    import torch
    from accelerate import load_checkpoint_in_model
    from safetensors.torch import save_file

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2))
    model[2].weight = model[1].weight
    weight = model[1].weight
    save_file({"0.bias": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_checkpoint_in_model(model, str(tmp_path), device_map={"": "cpu"})
    assert model[1].weight is weight
    assert model[2].weight is weight
    assert torch.equal(model[0].bias, torch.ones(2))
