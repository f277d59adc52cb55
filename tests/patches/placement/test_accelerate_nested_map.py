"""F14: a device map with entries inside entries is read as its most specific ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.placement.accelerate_nested_map import PATCH, _most_specific
from tests.helpers import Finished
from tests.patches.promise import Promise

TEXT = "model.language_model"
# "main" and "off" stand for the main device and for where modules are offloaded.
MAPS: dict[str, dict[str, str]] = {
    "catch-all, towers off": {"": "main", "model.vision_tower": "off", "model.audio_tower": "off"},
    "catch-all off, some main": {
        "": "off",
        f"{TEXT}.layers": "main",
        "lm_head": "main",
        f"{TEXT}.embed_tokens": "main",
    },
    "a part of a layer main": {"": "main", f"{TEXT}.layers.3": "off", f"{TEXT}.layers.3.mlp": "main"},
    "a part of a part": {"model": "main", "lm_head": "main", "model.vision_tower": "off"}
    | {"model.vision_tower.encoder": "main", "model.vision_tower.encoder.layers.1.self_attn": "off"},
    "a module with tensors of its own opened": {"": "main", "model.vision_tower.patch_embedder": "off"}
    | {"model.vision_tower.patch_embedder.input_proj": "main"},
    "the same device inside": {"": "main", f"{TEXT}.layers.0": "off", f"{TEXT}.layers.0.mlp": "off"},
}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"is on the meta device, we need a `value`"


def misplaced(model: Any, placement: dict[str, Any]) -> list[str]:
    """Parameters that are not where the most specific entry of their name puts them."""
    shared = {"lm_head.weight", f"{TEXT}.embed_tokens.weight"}  # one tensor, wherever one of its names keeps it
    return [
        name
        for name, parameter in model.named_parameters()
        if name not in shared
        and (parameter.device.type == "meta") != (placement[device_maps.entry_for(name, placement) or ""] == "disk")
    ]


@pytest.mark.parametrize("path", ["dispatch_model", "from_pretrained"])
@pytest.mark.parametrize("case", MAPS)
def test_a_nested_map_is_kept_and_answers_as_one_device(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, case: str, path: str
) -> None:
    placement = {name: workspace.main if where == "main" else "disk" for name, where in MAPS[case].items()}
    if path == "dispatch_model":
        model = workspace.dispatch_map(workspace.load(), placement)
    else:
        model = tiny.load(workspace.checkpoint, device_map=placement, offload_folder=tmp_path)
    assert model.hf_device_map == placement
    assert not misplaced(model, placement)
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert not misplaced(model, placement)


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_quantized_layers_under_a_catch_all(workspace: Any, one_device: Callable[..., Any], quantization: str) -> None:
    placement = {"": workspace.main, f"{TEXT}.layers.1": workspace.offloaded, f"{TEXT}.layers.4": workspace.offloaded}
    model = workspace.dispatch_map(workspace.load(quantization), placement)
    assert model.hf_device_map == placement
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0


def test_only_what_is_offloaded_is_written_to_disk(workspace: Any, tmp_path: Path) -> None:
    placement = {"": "disk", TEXT: workspace.main, "lm_head": workspace.main}
    tiny.dispatch(workspace.load(), placement, tmp_path)
    written = {path.stem for path in tmp_path.glob("*.dat")}
    assert written
    assert not {name for name in written if name.startswith((TEXT, "lm_head"))}


def test_most_specific_entries() -> None:
    torch = pytest.importorskip("torch")
    inner = torch.nn.ModuleDict({"x": torch.nn.Linear(1, 1), "y": torch.nn.Linear(1, 1)})
    model = torch.nn.ModuleDict({"a": inner, "b": torch.nn.Linear(1, 1)})
    assert _most_specific(model, {"a": 0, "b": 1}) == ({"a": "a", "b": "b"}, {})
    assert _most_specific(model, {"": 0, "b": 1}) == ({"b": "b", "a": ""}, {"": ""})
    assert _most_specific(model, {"": 0, "a.x": 1}) == ({"a.x": "a.x", "a.y": "", "b": ""}, {"": "", "a": ""})
    assert _most_specific(model, {"": 0, "a": 1, "a.x": 2, "no.such": 3}) == (
        {"a.x": "a.x", "a.y": "a", "b": ""},
        {"": "", "a": "a"},
    )


#: Whichever of the two accelerate would take for the main device.
_TWO_DEVICES = """
import gemma4_compat
import sys
from pathlib import Path
import accelerate, torch
from gemma4_compat._lab import tiny
from gemma4_compat._lab.stand_ins import second_device
from gemma4_compat._lab.workspace import Workspace, difference

workspace = Workspace(Path(sys.argv[1]))
expected = workspace.outputs(workspace.load(), device="cpu")
with second_device.second_device():
    devices = torch.device("cpu"), torch.device(second_device.DEVICE)
    for everywhere, layer in (devices, devices[::-1]):
        model = workspace.load()
        asked = {"model.language_model.layers.1": layer, "": everywhere}
        accelerate.dispatch_model(model, asked, skip_keys=tiny.skip_keys(model))
        for name, weight in model.named_parameters():
            wanted = layer if "language_model.layers.1." in name else everywhere
            assert weight.device == wanted, (name, weight.device)
        assert difference(expected, workspace.outputs(model, device="cpu")) == 0.0
print("as asked")
"""


def test_a_catch_all_of_one_device_beside_an_entry_of_another(
    workspace: Any, warm_child: Callable[..., Finished]
) -> None:
    pytest.importorskip("torch")
    from gemma4_compat._lab.stand_ins import second_device

    if not second_device.available():
        pytest.skip("this PyTorch takes no backend in Python")
    done = warm_child("-c", _TWO_DEVICES, str(workspace.folder))
    assert done.stdout == "as asked\n", done.stderr[-2000:]
    undone = warm_child("-c", _TWO_DEVICES, str(workspace.folder), environment={"GEMMA4_COMPAT_DISABLE": PATCH.id})
    assert undone.code != 0
    assert "AssertionError: ('model." in undone.stderr, undone.stderr[-2000:]
