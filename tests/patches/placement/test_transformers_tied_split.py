"""F15, F44: the embedding and the head that shares its weight under different entries of a map."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.placement.transformers_tied_split import PATCH
from tests.patches.placement.splits import EMBEDDING, HEAD, KINDS, PER_LAYER, split
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"KeyError: 'lm_head\.weight'"


@pytest.mark.parametrize("safetensors", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize(
    "offloaded",
    [names for n in (1, 2, 3) for names in itertools.combinations((EMBEDDING, HEAD, PER_LAYER), n)],
    ids=str,
)
def test_loaded_with_any_of_them_on_disk(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, offloaded: tuple[str, ...], safetensors: bool
) -> None:
    placement = tiny.device_map(workspace.load(), "none", main=workspace.main, offloaded="disk")
    placement |= dict.fromkeys(offloaded, "disk")
    checkpoint = workspace.checkpoint if safetensors else as_bin(workspace, tmp_path)
    model = tiny.load(checkpoint, device_map=placement, offload_folder=tmp_path / "offload")
    assert model.hf_device_map == placement
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert model.hf_device_map == placement
    for name in (EMBEDDING, HEAD, PER_LAYER):
        on_meta = model.get_submodule(name).weight.device.type == "meta"
        assert on_meta == (name in offloaded), name


@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize("offloaded", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD, PER_LAYER)], ids=str)
def test_dispatched_after_the_load(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, offloaded: tuple[str, ...]
) -> None:
    model = workspace.load(quantization)
    placement = tiny.device_map(model, "none", main=workspace.main, offloaded=workspace.offloaded)
    placement |= dict.fromkeys(offloaded, workspace.offloaded)
    model = workspace.dispatch_map(model, placement)
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert model.hf_device_map == placement
    for name in offloaded:
        assert model.get_submodule(name).weight.device.type == "meta", name


def tie(model: Any) -> None:
    model.tie_weights()


def tie_untied(model: Any) -> None:
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    model.tie_weights()


def set_the_same_embedding(model: Any) -> None:
    model.set_input_embeddings(model.get_input_embeddings())
    model.tie_weights()


def resize_to_the_same(model: Any) -> None:
    model.resize_token_embeddings(model.config.get_text_config().vocab_size)


@pytest.mark.parametrize("used", [False, True], ids=["before a forward", "after"])
@pytest.mark.parametrize("offloaded", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tied_again(
    workspace: Any,
    one_device: Callable[..., Any],
    tmp_path: Path,
    kind: str,
    offloaded: tuple[str, ...],
    used: bool,
) -> None:
    for number, action in enumerate([tie, tie_untied, set_the_same_embedding, resize_to_the_same]):
        model = split(workspace, kind, offloaded, tmp_path / str(number))
        if used:
            workspace.outputs(model)
        action(model)
        assert difference(one_device(None, None), workspace.outputs(model)) == 0.0, action
        for name in (EMBEDDING, HEAD):
            assert (model.get_submodule(name).weight.device.type == "meta") == (name in offloaded), name


def as_bin(workspace: Any, tmp_path: Path) -> Path:
    """The checkpoint in torch's own format, which transformers has to write again to offload it."""
    import shutil

    import torch

    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(workspace.checkpoint / "config.json", folder)
    model = tiny.load(workspace.checkpoint)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder
