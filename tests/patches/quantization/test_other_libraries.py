"""docs/QUANTIZATION.md, "Other libraries": the rows of checkpoints, each cell tried (``nox -s quantizers``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from tests.patches.quantization import other_libraries, qat
from tests.patches.quantization.test_accelerate_subclass_offload import logits

pytestmark = pytest.mark.full
PAGE = Path(__file__).parents[3] / "docs" / "QUANTIZATION.md"
PLACES = ("decoder layers in host memory", "decoder layers on disk", "loaded to disk")


def row(library: str) -> list[str]:
    """The cells of a library's row, its name left out."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (found,) = [line for line in lines if line.startswith(f"| {library} (")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


@pytest.fixture(scope="module", params=other_libraries.BUILDERS)
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    missing = [module for module in other_libraries.BUILDERS[name][0] if find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: nox -s quantizers")
    return name


@pytest.fixture(scope="module")
def load(library: str, workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``load(**options)``: the model."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("checkpoint")
    other_libraries.BUILDERS[library][1](workspace.checkpoint, folder)
    settings = {}
    if library.endswith("dequantized"):
        settings = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}

    def from_pretrained(**options: Any) -> Any:
        cls = transformers.Gemma4ForConditionalGeneration
        with gemma4_compat.quantize(packed=True) if library == "compressed-tensors" else contextlib.nullcontext():
            return cls.from_pretrained(folder, dtype=torch.bfloat16, **settings, **options).eval()

    return from_pretrained


def placed(workspace: Any, load: Callable[..., Any], place: str, folder: Path) -> Any:
    if place == "loaded to disk":
        return load(
            device_map=qat.layout(other_libraries.plain(workspace.checkpoint), "layers"), offload_folder=folder
        )
    model = load()
    if place.endswith("host memory"):
        return qat.into_host_memory(model, "layers")
    return workspace.dispatch_map(model, qat.layout(model, "layers"))


@pytest.mark.parametrize("place", PLACES)
def test_offloaded(workspace: Any, library: str, load: Callable[..., Any], place: str, tmp_path: Path) -> None:
    expected = logits(load())
    plain = logits(other_libraries.plain(workspace.checkpoint))
    assert not plain[0].equal(expected[0])
    assert row(library)[1:3][place != PLACES[0]] == "the same outputs"
    found = logits(placed(workspace, load, place, tmp_path))
    assert all(one.equal(other) for one, other in zip(expected, found, strict=True))


def test_lora(workspace: Any, library: str, load: Callable[..., Any], tmp_path: Path) -> None:
    expected = logits(load())
    assert row(library)[3].startswith("the same outputs")
    model = qat.adapted(load())
    adapted = logits(model)
    assert not adapted[0].equal(expected[0])
    for place in PLACES:
        found = logits(qat.adapted(placed(workspace, load, place, tmp_path / place)))
        assert all(one.equal(other) for one, other in zip(adapted, found, strict=True)), place
    batch = tiny.inputs(text_only=True)
    if library in ("GPTQ", "AWQ"):  # repacked by now
        assert model(**batch, labels=batch["input_ids"]).loss.grad_fn is None
        model = qat.adapted(load())
    model(**batch, labels=batch["input_ids"]).loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.requires_grad]
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients)
