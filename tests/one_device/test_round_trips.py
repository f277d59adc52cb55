"""Quantized models out and in: what is saved is the same file from anywhere, and the same model again, bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import Workspace

#: Quantization, and whether the model has experts, which are quantized, too.
KINDS = {
    "4bit": ("4bit", False),
    "4bit-double": ("4bit-double", False),
    "8bit": ("8bit", False),
    "4bit, experts": ("4bit", True),
    "4bit-double, experts": ("4bit-double", True),
}
PARTS = {"layers": ("layers.0", "layers.2"), "nearly everything": ("layers", "tower", "embed", "lm_head")}
WAYS = ("disk", "host memory", "loaded split", "quantized while loading split")


class Case:
    """One kind of model: how it is loaded, what it answers, and what its file holds."""

    def __init__(self, workspace: Workspace, kind: str, folder: Path) -> None:
        self.workspace, self.folder = workspace, folder
        self.quantization, self.experts = KINDS[kind]
        self.checkpoint = workspace.cached(tiny_models.build_moe_checkpoint) if self.experts else workspace.checkpoint
        self.expected = self.answers(self.load())
        self.saved = self.save(self.load())
        self.tensors = tensors(self.saved)

    def load(self, **options: Any) -> Any:
        """From the checkpoint in bf16, quantized while loading."""
        with gemma4_compat.quantize(experts=True) if self.experts else contextlib.nullcontext():
            return tiny.load(self.checkpoint, self.quantization, **options)

    def new_folder(self) -> Path:
        folder = self.folder / str(len(list(self.folder.iterdir())))
        folder.mkdir()
        return folder

    def save(self, model: Any, **options: Any) -> Path:
        folder = self.new_folder()
        model.save_pretrained(folder, max_shard_size="300KB", **options)
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder

    def answers(self, model: Any) -> Any:
        import torch

        batch = self.workspace.inputs(text_only=self.experts)
        with torch.no_grad():
            return [model(**batch).logits for _ in range(2)] + [model.generate(**batch, max_new_tokens=3)]

    def check(self, model: Any) -> None:
        """What it answers, and what it is saved as, is what it was."""
        import torch

        assert all(map(torch.equal, self.answers(model), self.expected))
        self.check_file(self.save(model))

    def check_file(self, folder: Path) -> None:
        """The same tensors, and the same model.

        A configuration that allowed offloading makes transformers take what a map puts on the CPU for unquantized,
        here everything, unless :func:`gemma4_compat.quantize` says otherwise.
        """
        import torch

        found = tensors(folder)
        assert found.keys() == self.tensors.keys()
        wrong = [name for name, value in self.tensors.items() if not _equal(value, found[name])]
        assert not wrong
        with gemma4_compat.quantize(offloaded=True):
            model = tiny.load(folder)
        assert all(map(torch.equal, self.answers(model), self.expected))


def _equal(one: Any, other: Any) -> bool:
    import torch

    return bool(one.dtype == other.dtype and torch.equal(one, other))


def tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def layout(model: Any, part: str, main: Any, offloaded: Any) -> dict[str, Any]:
    names = tiny.device_map(model, "none", main=main, offloaded=offloaded)
    return {name: offloaded if any(key in name for key in PARTS[part]) else main for name in names}


@pytest.fixture(params=list(KINDS))
def case(request: Any, workspace: Workspace, tmp_path: Path) -> Case:
    return Case(workspace, request.param, tmp_path)


def test_saved_before_and_after_a_forward_and_again(case: Case) -> None:
    case.check_file(case.saved)
    model = case.load()
    case.answers(model)
    case.check(model)
    case.check(tiny.load(case.saved))


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_saved_from_a_split_model(case: Case, way: str, part: str) -> None:
    import torch
    from accelerate import dispatch_model

    if way == "disk":
        model = case.load()
        model = tiny.dispatch(model, layout(model, part, "cpu", "disk"), case.new_folder())
    elif way == "host memory":
        model, cpu = case.load(), torch.device("cpu")
        skip = tiny.skip_keys(model)
        placement = layout(model, part, cpu, "cpu")
        model = dispatch_model(model, placement, main_device=cpu, skip_keys=skip, force_hooks=True)
    elif way == "loaded split":
        placement = layout(case.load(), part, "cpu", "disk")
        with gemma4_compat.quantize(offloaded=True):
            model = tiny.load(case.saved, device_map=placement, offload_folder=case.new_folder())
    else:
        placement = layout(case.load(), part, "cpu", "disk")
        with gemma4_compat.quantize(offloaded=True):
            model = case.load(device_map=placement, offload_folder=case.new_folder())
    case.check_file(case.save(model))
    case.check(model)
