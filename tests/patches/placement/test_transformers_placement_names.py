"""F26 and bad maps, for ``from_pretrained``: said before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._lab import tiny
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


def linears_in(model: Any, path: str) -> set[str]:
    return {
        type(module).__name__ for module in model.get_submodule(path).modules() if "Linear" in type(module).__name__
    }


def skip_warnings(recwarn: pytest.WarningsRecorder) -> list[str]:
    ours = [warning for warning in recwarn if warning.category is gemma4_compat.Gemma4CompatWarning]
    return [str(warning.message) for warning in ours if "llm_int8_skip_modules" in str(warning.message)]


def test_skip_list_entries_that_keep_something_are_not_named(workspace: Any, recwarn: pytest.WarningsRecorder) -> None:
    entries = ["model.embed_vision", "embedding_projection", "model.language_model.layers.1", "q_proj", "embed_tokens"]
    tiny.load(workspace.checkpoint, "4bit", skip_modules=entries)
    assert not skip_warnings(recwarn)


def test_skip_list_entries_that_end_above_the_linear_layers_keep_nothing(
    workspace: Any, recwarn: pytest.WarningsRecorder
) -> None:
    quantized = tiny.load(workspace.checkpoint, "4bit", skip_modules=["embed_vision", "per_layer_input_gate"])
    assert linears_in(quantized, "model.embed_vision") == {"Linear4bit"}
    (text,) = skip_warnings(recwarn)
    assert "'embed_vision' (write 'model.embed_vision')" in text
    assert "per_layer_input_gate" not in text
    assert "gemma4_compat.quantization_skip_modules" in text
    recwarn.clear()
    kept = tiny.load(workspace.checkpoint, "4bit", skip_modules=["model.embed_vision"])
    assert linears_in(kept, "model.embed_vision") == {"Linear"}
    assert not skip_warnings(recwarn)


def test_the_towers_by_the_end_of_their_paths(workspace: Any, recwarn: pytest.WarningsRecorder) -> None:
    towers = {"vision_tower", "audio_tower"}
    model = tiny.load(workspace.checkpoint, "4bit", skip_modules=[*towers, "ffw_layer_1"], towers=True)
    assert "Linear4bit" in linears_in(model, "model.vision_tower")
    (text,) = skip_warnings(recwarn)
    assert all(f"{tower!r} (write 'model.{tower}')" in text for tower in towers)
    assert "'ffw_layer_1' (write each of the " in text


def test_the_whole_model_on_disk(workspace: Any, tmp_path: Path) -> None:
    import transformers

    def load() -> Any:
        return tiny.load(workspace.checkpoint, device_map={"": "disk"}, offload_folder=tmp_path)

    if versions.admits("<5.13", transformers.__version__):
        with pytest.raises(gemma4_compat.Gemma4CompatError, match="whole model on disk"):
            load()
    else:
        assert load().hf_device_map == {"": "disk"}
