"""F49: adapters that are saved with base weights of the embedding and the head."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny_adapters
from gemma4_compat.patches.checkpoints.peft_save_offloaded import PATCH
from tests.helpers import pairwise
from tests.patches.adapters import tied_halves
from tests.patches.adapters.tied_halves import HALVES, LAYERS, PLACES
from tests.patches.promise import Promise

TARGETS: dict[str, Any] = {"embedding": ["embed_tokens"], "head": ["lm_head"], "layers": LAYERS}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "Cannot copy out of meta tensor"
    exact = False  # the files are compared


@functools.cache
def adapter(workspace: Any, targets: str) -> Path:
    folder = workspace.folder / f"saved-{targets}"
    return tiny_adapters.write_adapter(workspace.load(), TARGETS[targets], folder)


def saved(workspace: Any, base: Any, targets: str, **options: Any) -> dict[str, Any]:
    from peft import PeftModel
    from safetensors.torch import load_file

    model = PeftModel.from_pretrained(base, adapter(workspace, targets))
    folder = tempfile.mkdtemp(prefix="saved-", dir=workspace.folder)
    model.save_pretrained(folder, **options)
    return load_file(Path(folder, "adapter_model.safetensors"))


@functools.cache
def expected(workspace: Any, targets: str, embeddings: Any) -> dict[str, Any]:
    return saved(workspace, workspace.load(), targets, save_embedding_layers=embeddings)


@pytest.mark.parametrize(
    ("targets_and_embeddings", "half", "place", "after_forward"),
    pairwise(
        [("embedding", "auto"), ("head", "auto"), ("layers", True), ("head", False)],
        list(HALVES),
        PLACES,
        [False, True],
    ),
)
def test_the_saved_adapter_is_that_of_one_device(
    workspace: Any, targets_and_embeddings: tuple[str, Any], half: str, place: str, after_forward: bool
) -> None:
    targets, embeddings = targets_and_embeddings
    model = tied_halves.split(workspace, place, HALVES[half])
    if after_forward:
        tied_halves.logits(workspace, model)
    found = saved(workspace, model, targets, save_embedding_layers=embeddings)
    assert tied_halves.same(expected(workspace, targets, embeddings), found)


@pytest.mark.parametrize("place", ["ram", "disk"])
def test_the_adapter_of_a_transformers_model(workspace: Any, place: str) -> None:
    files = []
    for model in (workspace.load(), tied_halves.split(workspace, place, HALVES["both"])):
        model.load_adapter(str(adapter(workspace, "head")))
        files.append(tied_halves.saved(workspace, model))
    assert tied_halves.same(*files)
