"""F26 and bad maps, for ``from_pretrained``: said before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._reproduction import tiny
from gemma4_compat.patches.placement.transformers_placement_names import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"entries that match nothing are ignored"
    exact = False


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lm_head": "cuda:99"}, r"'lm_head' on 'cuda:99': this machine has"),
        ({"lm_head": "dsik"}, r"'lm_head' on 'dsik': no such device"),
        ({"model.vision_tower": None}, r"no device for model\.vision_tower\. Add entries"),
    ],
)
def test_a_map_that_cannot_work_is_one_error(
    workspace: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    asked = {**tiny.device_map(workspace.load(), "towers", main=workspace.main, offloaded="disk"), **change}
    asked = {name: device for name, device in asked.items() if device is not None}
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=message):
        tiny.load(workspace.checkpoint, device_map=asked, offload_folder=tmp_path / "offload")
    assert not (tmp_path / "offload").exists()


def test_skip_list_entries_that_keep_something_are_not_named(workspace: Any, recwarn: pytest.WarningsRecorder) -> None:
    tiny.load(workspace.checkpoint, "4bit", skip_modules=["embed_vision", "model.language_model.layers.1"])
    assert not [w for w in recwarn if w.category is gemma4_compat.Gemma4CompatWarning]


def test_the_whole_model_on_disk(workspace: Any, tmp_path: Path) -> None:
    import transformers

    def load() -> Any:
        return tiny.load(workspace.checkpoint, device_map={"": "disk"}, offload_folder=tmp_path)

    if versions.admits("<5.13", transformers.__version__):
        with pytest.raises(gemma4_compat.Gemma4CompatError, match="whole model on disk"):
            load()
    else:
        assert load().hf_device_map == {"": "disk"}
