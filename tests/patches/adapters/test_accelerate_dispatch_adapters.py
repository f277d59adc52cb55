"""F13: a model is dispatched that has adapters already."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny_adapters
from gemma4_compat.patches.adapters.accelerate_dispatch_adapters import PATCH
from tests.patches.adapters import tied_halves
from tests.patches.adapters.tied_halves import EMBEDDING, HEAD, LAYERS
from tests.patches.promise import Promise

LAYER = "model.language_model.layers.1"
KINDS: dict[str, dict[str, Any]] = {
    "layers": {"targets": LAYERS},
    "dora": {"targets": LAYERS, "use_dora": True},
    "embedding": {"targets": ["embed_tokens", "lm_head"]},
    "tokens": {"targets": LAYERS, "trainable_token_indices": {"embed_tokens": [3, 7]}},
    "copy": {"targets": LAYERS, "modules_to_save": ["lm_head"]},
}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "adapter weights are on meta"


@functools.cache
def adapter(workspace: Any, kind: str) -> Path:
    options = dict(KINDS[kind])
    return tiny_adapters.write_adapter(
        workspace.load(), options.pop("targets"), workspace.folder / f"dispatched-{kind}", **options
    )


def loaded(workspace: Any, kind: str, quantization: str | None = None) -> Any:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load(quantization), adapter(workspace, kind), is_trainable=True)
    return tied_halves.perturbed(model)


def dispatched(model: Any, place: str, names: tuple[str, ...], folder: Path) -> None:
    import torch
    from accelerate import dispatch_model

    main, offloaded = (torch.device("cpu"), "cpu") if place == "ram" else ("cpu", "disk")
    placement = {"": main, **dict.fromkeys(names, offloaded)}
    dispatch_model(model.get_base_model(), placement, main_device=main, offload_dir=str(folder))


def shown(workspace: Any, model: Any) -> list[Any]:
    return [
        tied_halves.logits(workspace, model.eval()),
        tied_halves.trained(workspace, model),
        tied_halves.logits(workspace, model),
        tied_halves.saved(workspace, model),
    ]


@functools.cache
def expected(workspace: Any, kind: str, quantization: str | None = None) -> list[Any]:
    return shown(workspace, loaded(workspace, kind, quantization))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["ram", "disk"])
@pytest.mark.parametrize("names", [(EMBEDDING, LAYER), (HEAD, LAYER), ("model",)], ids=["embedding", "head", "model"])
def test_adapters_compute_train_and_save_as_on_one_device(
    workspace: Any, kind: str, place: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    model = loaded(workspace, kind)
    order = [name for name, _ in model.named_parameters()]
    dispatched(model, place, names, tmp_path)
    assert [name for name, _ in model.named_parameters()] == order, "an optimizer goes by their order"
    assert tied_halves.same(expected(workspace, kind), shown(workspace, model))


@pytest.mark.parametrize("quantization", ["4bit-double", "8bit"])
def test_adapters_on_quantized_layers(workspace: Any, quantization: str, tmp_path: Path) -> None:
    model = loaded(workspace, "layers", quantization)
    dispatched(model, "ram", (EMBEDDING, LAYER), tmp_path)
    assert tied_halves.same(expected(workspace, "layers", quantization), shown(workspace, model))


def test_a_dispatch_that_fails_leaves_the_adapters(workspace: Any, tmp_path: Path) -> None:
    model = loaded(workspace, "embedding")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    (tmp_path / "file").touch()
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="cannot be written"):
        dispatched(model, "disk", ("model.language_model",), tmp_path / "file" / "folder")
    assert tied_halves.same(before, dict(model.named_parameters()))


def test_a_model_dispatched_with_the_patch_works_without_it(workspace: Any, tmp_path: Path) -> None:
    model = loaded(workspace, "tokens")
    dispatched(model, "ram", (EMBEDDING, LAYER), tmp_path)
    gemma4_compat.revert(PATCH.id)
    try:
        assert tied_halves.same(expected(workspace, "tokens"), shown(workspace, model))
    finally:
        gemma4_compat.install()
