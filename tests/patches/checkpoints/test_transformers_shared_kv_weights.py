"""F55: ``save_pretrained`` keeps the keys and values of KV-shared layers that the checkpoint had."""

from __future__ import annotations

import copy
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import Workspace, difference
from gemma4_compat.patches.checkpoints.transformers_shared_kv_weights import PATCH
from tests.conftest import census, is_affected
from tests.patches.placement.splits import EMBEDDING, HEAD, KINDS, PER_LAYER, split
from tests.patches.promise import Promise

LAYERS = (4, 5)
NAMES = [f"layers.{layer}.self_attn.{name}.weight" for layer in LAYERS for name in ("k_proj", "v_proj", "k_norm")]
TEXT = "model.language_model."


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"6 of \d+ tensors lost, model\.language_model\.layers\.4\.self_attn\.k_norm\.weight among them"
    exact = False  # files are compared


@pytest.fixture(scope="module")
def released(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build_released(workspace.checkpoint, tmp_path_factory.mktemp("released") / "checkpoint")


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def quiet_save(model: Any, folder: Path, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", Gemma4CompatWarning)
        model.save_pretrained(folder, **options)
    return tensors(folder)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "50KB"}, {"save_original_format": False}], ids=str)
def test_the_saved_checkpoint_is_the_loaded_one(released: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    assert_same(quiet_save(tiny.load(released), tmp_path, **options), tensors(released))


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_and_sharded(workspace: Any, released: Path, tmp_path: Path, kind: str) -> None:
    names = (EMBEDDING, HEAD, PER_LAYER, f"{TEXT}layers.1", f"{TEXT}layers.5")
    model = split(Workspace(released.parent), kind, names, tmp_path / "offload")
    workspace.outputs(model)
    assert_same(quiet_save(model, tmp_path / "saved", max_shard_size="50KB"), tensors(released))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_in_the_dtype_of_the_save(released: Path, tmp_path: Path, dtype: str) -> None:
    import torch

    wanted = getattr(torch, dtype)
    saved, given = quiet_save(tiny.load(released).to(wanted), tmp_path), tensors(released)
    for name in NAMES:
        assert saved[TEXT + name].dtype is wanted
        assert torch.equal(saved[TEXT + name], given[TEXT + name].to(wanted))


def test_in_place_again_and_again(released: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    quiet_save(tiny.load(released), folder, max_shard_size="50KB")
    model = tiny.load(folder)
    for size in ("5GB", "20KB", "5GB", "30KB"):
        assert_same(quiet_save(model, folder, max_shard_size=size), tensors(released))
    (folder / "model.safetensors").unlink()  # transformers leaves it beside the shards
    assert_same(quiet_save(model, folder, max_shard_size="40KB"), tensors(released))
    assert_same(quiet_save(tiny.load(folder), tmp_path / "second"), tensors(released))


def test_the_working_folder_may_change(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(released.parent)
    model = tiny.load(Path(released.name))
    monkeypatch.chdir(tmp_path)
    assert_same(quiet_save(model, tmp_path / "saved"), tensors(released))


def test_what_cannot_be_read_any_more_is_said_once(workspace: Any, released: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(released, folder)
    model = tiny.load(folder)
    shutil.rmtree(folder)
    if not is_affected(PATCH):
        assert_same(quiet_save(model, tmp_path / "saved"), tensors(released))
        return
    with pytest.warns(Gemma4CompatWarning, match="gemma4-compat repair CHECKPOINT --from ORIGINAL OUT") as said:
        model.save_pretrained(tmp_path / "saved")
    assert [item.filename for item in said if item.category is Gemma4CompatWarning] == [__file__]
    assert tensors(released).keys() - tensors(tmp_path / "saved").keys() == {TEXT + name for name in NAMES}
    assert difference(workspace.outputs(model), workspace.outputs(tiny.load(tmp_path / "saved"))) == 0.0


def test_a_state_dict_is_not_kept_for_it(released: Path, tmp_path: Path) -> None:
    import transformers

    cls = getattr(transformers, tiny_models.class_name(released))
    config = transformers.AutoConfig.from_pretrained(released)
    model = cls.from_pretrained(None, config=config, state_dict=tensors(released), dtype="bfloat16")
    if is_affected(PATCH):
        with pytest.warns(Gemma4CompatWarning, match="loaded from a state dict"):
            model.save_pretrained(tmp_path)
    else:
        assert_same(quiet_save(model, tmp_path), tensors(released))


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantized_model_is_saved_as_before(
    workspace: Any, released: Path, tmp_path: Path, quantization: str
) -> None:
    expected = quiet_save(workspace.load(quantization), tmp_path / "expected")
    assert quiet_save(tiny.load(released, quantization), tmp_path / "saved").keys() == expected.keys()


def test_the_language_model_of_a_multimodal_checkpoint(released: Path, tmp_path: Path) -> None:
    import torch

    model = tiny.load(released, cls=tiny_models.class_name(released, text_only=True))
    saved, given = quiet_save(model, tmp_path), tensors(released)
    assert {name for name in saved if not name.startswith("model.")} == set()
    for name in NAMES:
        assert torch.equal(saved[f"model.{name}"], given[TEXT + name])


def test_a_merged_adapter(workspace: Any, released: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    model = PeftModel.from_pretrained(tiny.load(released), workspace.adapter("language")).merge_and_unload()
    saved, given = quiet_save(model, tmp_path), tensors(released)
    assert saved.keys() == given.keys()
    assert all(torch.equal(saved[TEXT + name], given[TEXT + name]) for name in NAMES)


def test_an_adapter_alone_has_none_of_them(workspace: Any, released: Path, tmp_path: Path) -> None:
    model = tiny.load(released)
    model.load_adapter(str(workspace.adapter("language")))
    assert not any("base_layer" in name or name.endswith("k_norm.weight") for name in quiet_save(model, tmp_path))


def test_a_part_of_the_model_is_saved_as_that_part(released: Path, tmp_path: Path) -> None:
    model = tiny.load(released)
    part = {name: tensor for name, tensor in model.state_dict().items() if ".layers.4." in name or "embed" in name}
    given = dict(part)
    saved = quiet_save(model, tmp_path, state_dict=part)
    added = {name for name in NAMES if "layers.4." in name}
    if is_affected(PATCH):
        assert saved.keys() == given.keys() | {TEXT + name for name in added}


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_copies_of_a_model(released: Path, tmp_path: Path, duplicate: Any) -> None:
    assert_same(quiet_save(duplicate(tiny.load(released)), tmp_path), tensors(released))


def test_nothing_of_it_is_in_memory(workspace: Any, released: Path, tmp_path: Path) -> None:
    model = tiny.load(released)
    before = census()
    model.save_pretrained(tmp_path)
    assert census() == before


def test_a_checkpoint_without_them_is_saved_without_a_word(workspace: Any, tmp_path: Path) -> None:
    assert_same(quiet_save(workspace.load(), tmp_path), tensors(workspace.checkpoint))


def test_tests_know_the_layers(released: Path, workspace: Any) -> None:
    found = tensors(released).keys() - tensors(workspace.checkpoint).keys()
    assert found == ({TEXT + name for name in NAMES} if is_affected(PATCH) else set())
