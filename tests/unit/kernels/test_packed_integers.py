"""Weights that stay the integers of a compressed-tensors checkpoint: unpacked by one kernel, with PyTorch's bits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._gemma4.quantization import packed_linear
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import dequantizing

CPU = torch.device("cpu")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def packed(
    outputs: int = 5, inputs: int = 128, *, group: int = 32, dtype: Any = torch.bfloat16, seed: int = 0
) -> dict[str, Any]:
    """The tensors of a layer, as ``packed_linear.unpacked`` takes them; a group of 0 is the whole weight."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (outputs, -(-inputs // 8)), generator=generator)
    shape = (outputs, inputs // group) if group else (1,)
    scale = (torch.rand(shape, generator=generator) * 0.1).to(dtype)
    return {"packed": words.to(torch.int32), "scale": scale, "columns": inputs, "bits": 4, "stored": dtype}


@pytest.fixture
def launched(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were launched, without those of trials."""
    found: list[Any] = []
    launch = kernels.Kernels.launch

    def noted(self: Any, kernel: Any) -> None:
        if not getattr(kernels.of(CPU).tests._here, "trying", False):
            found.append(kernel)
        launch(self, kernel)

    monkeypatch.setattr(kernels.Kernels, "launch", noted)
    monkeypatch.setattr(dequantizing, "_launches", {})
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("inputs", "group"), [(192, 32), (256, 128), (1160, 1160), (64, 0), (48, 24)])
def test_one_kernel_has_the_bits(launched: list[Any], inputs: int, group: int, dtype: Any) -> None:
    given = packed(67, inputs, group=group, dtype=dtype)
    given["scale"].view(-1)[0] = 3e-38 if dtype != torch.float16 else 6e-8  # subnormal
    found = dequantizing.unpacked(**given)
    assert same_bits(found, packed_linear.unpacked(**given))
    assert len(launched) == 1
    again = dequantizing.unpacked(**given)
    assert again.data_ptr() != found.data_ptr()
    assert same_bits(again, found)


def _eight_bits(given: dict[str, Any]) -> None:
    given |= {"bits": 8, "columns": given["columns"] // 2, "scale": given["scale"][:, :2].contiguous()}


def _cast_since(given: dict[str, Any]) -> None:
    given["scale"] = given["scale"].float()


def _columns_that_no_word_ends_with(given: dict[str, Any]) -> None:
    given |= {"columns": 125, "scale": given["scale"][:, :1].contiguous()}


def _groups_that_no_word_ends_with(given: dict[str, Any]) -> None:
    given["scale"] = given["scale"].repeat_interleave(8, 1)


def _with_gaps(given: dict[str, Any]) -> None:
    given["scale"] = given["scale"].repeat_interleave(2, 1)[:, ::2]


@pytest.mark.parametrize(
    "change",
    [_eight_bits, _cast_since, _columns_that_no_word_ends_with, _groups_that_no_word_ends_with, _with_gaps],
    ids=lambda change: change.__name__.strip("_"),
)
def test_what_is_left_to_pytorch(launched: list[Any], change: Callable[[dict[str, Any]], None]) -> None:
    change(given := packed())
    assert same_bits(dequantizing.unpacked(**given), packed_linear.unpacked(**given))
    assert launched == []


def test_other_bits_leave_it_to_pytorch(
    launched: list[Any], change_file: Any, caplog: pytest.LogCaptureFixture
) -> None:
    change_file("nf4_dequantize.cuh", "15u) - 8)", "15u) - 7)")
    given = packed()
    with caplog.at_level(logging.INFO, "gemma4_compat"):
        for _ in range(2):
            assert same_bits(dequantizing.unpacked(**given), packed_linear.unpacked(**given))
    assert launched == []
    assert caplog.text.count("PyTorch dequantizes 4-bit weights") == 1
