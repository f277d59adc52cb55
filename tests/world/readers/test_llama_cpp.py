"""llama.cpp with an exported adapter gives transformers' logits with the adapter by PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._adapter_tools.export.gguf import _OF_LAYERS
from tests.world.readers import models
from tests.world.readers.conftest import CASES, VARIANTS

#: Differences of logits; llama.cpp's GELU is a table in float16. Up to 0.015 without an adapter, 0.05 with one, of
#: logits up to 5 (2026-11-23); an adapter changes them by 2.7 and more.
BOUND = 0.15
EFFECT = 2.0


@pytest.fixture(scope="session")
def model(place: Path, checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """``model(variant)``: the base as a GGUF file."""

    def get(variant: str) -> Path:
        file = place / f"{variant}.gguf"
        return file if file.exists() else models.write_gguf(checkpoint(variant), file)

    return get


def test_names_are_those_of_gguf() -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: nox -s readers")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, 1)
    found = {inside: names.get_name(f"model.layers.0.{inside}").removeprefix("blk.0.") for inside in _OF_LAYERS}
    assert found == _OF_LAYERS


@pytest.mark.parametrize("variant, kind", CASES)
def test_the_file_is_read(checkpoint: Any, adapter: Any, tmp_path: Path, variant: str, kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: nox -s readers")
    folder = adapter(variant, kind)
    report = gemma4_compat.export_adapter(folder, tmp_path / "out", "gguf", base=checkpoint(variant))
    assert report.files == ("adapter.gguf",)
    read = gguf.GGUFReader(tmp_path / "out" / "adapter.gguf")
    fields = {name: field.contents() for name, field in read.fields.items()}
    assert fields["general.type"] == "adapter"
    assert fields["general.architecture"] == gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GEMMA4]
    assert fields[gguf.Keys.Adapter.TYPE] == "lora"
    assert fields[gguf.Keys.Adapter.LORA_ALPHA] == report.scale * report.rank
    assert {tensor.tensor_type for tensor in read.tensors} == {gguf.GGMLQuantizationType.F32}
    ends = [tensor.name.rpartition(".")[2] for tensor in read.tensors]
    assert ends.count("lora_a") == ends.count("lora_b") == report.modules


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_base(checkpoint: Any, model: Any, variant: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: nox -s readers")
    found = models.by_llama_cpp(model(variant), None)
    assert abs(models.by_peft(checkpoint(variant), None) - found).max() < BOUND


@pytest.mark.parametrize("variant, kind", CASES)
def test_llama_cpp(checkpoint: Any, adapter: Any, model: Any, tmp_path: Path, variant: str, kind: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: nox -s readers")
    base, folder = checkpoint(variant), adapter(variant, kind)
    gemma4_compat.export_adapter(folder, tmp_path / "out", "gguf", base=base)
    wanted = models.by_peft(base, folder)
    assert abs(wanted - models.by_llama_cpp(model(variant), tmp_path / "out")).max() < BOUND
    assert abs(wanted - models.by_peft(base, None)).max() > EFFECT
