"""F40: token embeddings resized while they, the head or the per-layer embeddings are offloaded."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab.workspace import Workspace, difference
from gemma4_compat._offload.weights import stored_weights, tied_pairs
from gemma4_compat.patches.placement.transformers_resize_offloaded import PATCH
from tests.helpers import pairwise
from tests.patches.placement.splits import EMBEDDING, HEAD, KINDS, PER_LAYER, split
from tests.patches.promise import Promise

OFFLOADED = {"embedding": (EMBEDDING,), "head": (HEAD,), "all": (EMBEDDING, HEAD, PER_LAYER)}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Trying to set a tensor of shape"


def resize(model: Any, tokens: int | None, **options: Any) -> Any:
    import torch

    torch.manual_seed(3)
    model.resize_token_embeddings(tokens, **options)
    return model


@pytest.mark.parametrize(("kind", "offloaded", "used"), pairwise(KINDS, list(OFFLOADED), [False, True]))
def test_is_as_on_one_device(workspace: Any, tmp_path: Path, kind: str, offloaded: str, used: bool) -> None:
    for number, (tokens, options) in enumerate(
        [(300, {}), (300, {"mean_resizing": False}), (240, {}), (None, {"pad_to_multiple_of": 100})]
    ):
        reference = resize(workspace.load(), tokens, **options)
        model = split(workspace, kind, OFFLOADED[offloaded], tmp_path / str(number))
        placement = dict(model.hf_device_map)
        if used:
            workspace.outputs(model)
        resize(model, tokens, **options)
        assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0, (tokens, options)
        assert model.hf_device_map == placement
        for name in (EMBEDDING, HEAD, PER_LAYER):
            weight = model.get_submodule(name).weight
            assert weight.shape == reference.get_submodule(name).weight.shape
            assert (weight.device.type == "meta") == (name in OFFLOADED[offloaded]), name


@pytest.mark.parametrize("kind", [None, "disk"])
def test_of_a_model_that_has_no_per_layer_embeddings(tmp_path: Path, kind: str | None) -> None:
    workspace = Workspace.build(tmp_path, "31B")
    reference = resize(workspace.load(), 300)
    model = workspace.load() if kind is None else split(workspace, kind, (EMBEDDING,), tmp_path / "offload")
    resize(model, 300)
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_of_a_quantized_model_twice_and_back(workspace: Any, tmp_path: Path, kind: str) -> None:
    reference, model = workspace.load("4bit"), split(workspace, kind, OFFLOADED["all"], tmp_path, "4bit")
    for tokens in (300, 320, 256):
        resize(reference, tokens), resize(model, tokens)
        assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


def test_the_checkpoint_and_other_models_in_the_folder_are_left_alone(workspace: Any, tmp_path: Path) -> None:
    checkpoint = {path: path.read_bytes() for path in workspace.checkpoint.iterdir()}
    first = split(workspace, "disk", OFFLOADED["all"], tmp_path)
    second = split(workspace, "disk", OFFLOADED["all"], tmp_path)
    loaded = split(workspace, "from_pretrained", OFFLOADED["all"], tmp_path / "other")
    reference = workspace.outputs(second)
    resize(first, 300), resize(loaded, 300)
    assert difference(reference, workspace.outputs(second)) == 0.0
    assert checkpoint == {path: path.read_bytes() for path in workspace.checkpoint.iterdir()}


def test_files_go_with_the_last_model_that_reads_them(workspace: Any, tmp_path: Path) -> None:
    model = split(workspace, "disk", OFFLOADED["all"], tmp_path)
    before = set(tmp_path.iterdir())
    resize(model, 300)
    written = set(tmp_path.iterdir()) - before
    assert len(written) == 2  # a tied weight once
    copied = copy.deepcopy(model)
    expected = workspace.outputs(model)
    resize(model, 310)
    assert written <= set(tmp_path.iterdir())
    assert difference(expected, workspace.outputs(copied)) == 0.0
    del copied
    import gc

    gc.collect()
    assert not written & set(tmp_path.iterdir())
    assert len(set(tmp_path.iterdir()) - before) == 2


def test_without_a_folder_the_weight_is_kept_in_host_memory(
    workspace: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "_said", set())
    model = split(workspace, "from_pretrained", OFFLOADED["all"], None)
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        resize(model, 300)
    assert caplog.text.count("kept in host memory: no offload_folder was given") == 1
    expected = workspace.outputs(resize(workspace.load(), 300))
    assert difference(expected, workspace.outputs(model)) == 0.0
    assert model.lm_head.weight.device.type == "meta"


def test_where_memory_runs_out_it_is_done_on_the_host(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import PreTrainedModel

    model = split(workspace, "ram", OFFLOADED["all"], tmp_path)
    upstream, failures = PreTrainedModel._init_added_embeddings_weights_with_mean, [torch.OutOfMemoryError("full")]

    def once(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return upstream(*args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "_init_added_embeddings_weights_with_mean", once)
    resize(model, 300)
    assert not failures
    assert workspace.outputs(model).logits[0].shape[-1] == 300


def test_an_error_leaves_the_model_as_it_was(workspace: Any, tmp_path: Path) -> None:
    model = split(workspace, "disk", OFFLOADED["all"], tmp_path)
    expected = workspace.outputs(model)
    with pytest.raises(ValueError, match="not and integer"):
        model.resize_token_embeddings(300, pad_to_multiple_of=2.5)
    assert difference(expected, workspace.outputs(model)) == 0.0


def test_an_untied_head_has_its_hook_afterwards(workspace: Any, tmp_path: Path) -> None:
    def untied() -> Any:
        import torch

        model = workspace.load()
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
        model.all_tied_weights_keys = {}
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
        return model

    reference = resize(untied(), 300)
    model = resize(split(workspace, "disk", OFFLOADED["all"], tmp_path, model=untied()), 300)
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0
    assert model.lm_head.weight.device.type == "meta"
    assert not tied_pairs.tied(model)
