"""With deterministic algorithms a training has the same bits on one GPU, wherever the base is, and again."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gemma4_compat
from tests.one_device.test_training import STEPS, losses, trainer
from tests.patches.training.parts import only

QUANTIZATIONS = [None, "4bit", "8bit"]
#: Where the modules of the language model are that are not on the GPU: a prefix of their names, and a place.
PLACES = {
    "on the GPU": ("", ""),
    "the per-layer table": ("language_model.embed_tokens_per_layer", "cpu"),
    "half of the layers": ("language_model.layers.1 language_model.layers.3 language_model.layers.5", "cpu"),
    "every layer": ("language_model.layers", "cpu"),
    "every layer on disk": ("language_model.layers", "disk"),
    "the towers": ("vision_tower audio_tower", "cpu"),
}
WAYS: dict[str, dict[str, Any]] = {
    "a step": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"checkpointing": True},
    "resumed": {"save_strategy": "steps", "save_steps": STEPS // 2},
}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a user turns it on: an operation without a deterministic kernel is an error."""
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def placed(workspace: Any, quantization: str | None, place: str) -> Any:
    names, where = PLACES[place]
    model = workspace.load(quantization)
    if not where:
        return model
    placement = workspace.device_map(model, "none")
    away = tuple(f"model.{name}" for name in names.split())
    placement |= {name: where for name in placement if any(f"{name}.".startswith(f"{one}.") for one in away)}
    assert where in placement.values()
    return workspace.dispatch_map(model, placement)


def is_replayed(base: Any) -> bool:
    layers = base.model.language_model.layers
    return all(weight.is_cuda for weight in layers.parameters()) and not getattr(base, "is_loaded_in_8bit", False)


def trained(
    base: Any, workspace: Any, folder: Path, way: str, *, fast: bool = False, **parts: Any
) -> tuple[list[float], str]:
    """The losses of ten steps, and a digest of the adapter after them. ``parts``: of ``train_fast``, beside graphs."""
    one = trainer(workspace, base, folder, bf16=True, lr_scheduler_type="constant", **WAYS[way])
    if fast:
        only(one.model, graphs=True, **parts)
    one.train()
    if way == "resumed":
        one.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
    if fast and is_replayed(base):
        assert gemma4_compat.statistics(one.model).training.captured
    digest = hashlib.sha256()
    for name, weight in sorted(one.model.named_parameters()):
        if weight.requires_grad:
            digest.update(name.encode() + weight.detach().float().cpu().numpy().tobytes())
    return losses(one)[-STEPS:], digest.hexdigest()


@pytest.fixture(scope="module")
def right(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``right(quantization, way)``: of the whole base on the GPU, without graphs."""

    @functools.cache
    def of(quantization: str | None, way: str) -> tuple[list[float], str]:
        return trained(workspace.load(quantization), workspace, tmp_path_factory.mktemp("right"), way)

    return of


@pytest.mark.parametrize("fast", [False, True], ids=["eager", "train_fast"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_every_placement(
    workspace: Any, right: Any, tmp_path: Path, quantization: str | None, place: str, fast: bool
) -> None:
    """The first of them, eager, trains again what is compared with."""
    found = trained(placed(workspace, quantization, place), workspace, tmp_path, "a step", fast=fast)
    assert found == right(quantization, "a step")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "a step"])
@pytest.mark.parametrize("place", ["on the GPU", "half of the layers"])
@pytest.mark.parametrize("fast", [False, True], ids=["eager", "train_fast"])
def test_every_way(workspace: Any, right: Any, tmp_path: Path, place: str, way: str, fast: bool) -> None:
    found = trained(placed(workspace, "4bit", place), workspace, tmp_path, way, fast=fast)
    assert found == right("4bit", way)
    if way == "checkpointing":
        assert found == right("4bit", "a step")


def test_train_fast_needs_no_switch(workspace: Any, tmp_path: Path) -> None:
    """Its attention adds gradients in one order, wherever the base is."""
    torch.use_deterministic_algorithms(False)
    parts, found = {"windows": True, "products": True, "loss": True}, []
    for number, place in enumerate(("on the GPU", "on the GPU", "the per-layer table", "half of the layers")):
        base, folder = placed(workspace, "4bit", place), tmp_path / str(number)
        found.append(trained(base, workspace, folder, "a step", fast=True, **parts))
    assert found[1:] == [found[0]] * 3
