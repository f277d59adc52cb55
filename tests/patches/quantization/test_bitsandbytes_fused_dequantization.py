"""F105: a 4-bit weight is dequantized by one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch
from bitsandbytes import functional

from gemma4_compat._engine.changes import upstream
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import dequantizing
from gemma4_compat._kernels.specs.expert_rows import Format
from gemma4_compat._kernels.specs.nf4_dequantize import computed
from gemma4_compat._lab.stand_ins.packed_weights import Compiler
from gemma4_compat.patches.quantization import bitsandbytes_fused_dequantization
from gemma4_compat.patches.quantization.bitsandbytes_fused_dequantization import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "dequantized with two kernels and two tensors more for its scales"


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the kernel was launched since the last call."""
    monkeypatch.setitem(kernels.COMPILERS, "cpu", Compiler)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(dequantizing, "_launches", {})

    def since() -> int:
        found, Compiler.launches = Compiler.launches, 0
        return found

    since()
    return since


def quantized(nested: bool = True) -> tuple[Any, Any]:
    values = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found: tuple[Any, Any] = functional.quantize_4bit(values, quant_type="nf4", compress_statistics=nested)
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_dequantize_4bit(launches: Callable[[], int], nested: bool) -> None:
    packed, state = quantized(nested)
    expected = upstream(functional.dequantize_4bit)(packed, state)
    assert launches() == 0
    assert torch.equal(functional.dequantize_4bit(packed, state), expected)
    assert launches() == 2  # one is the trial
    assert torch.equal(functional.dequantize_4bit(packed, quant_state=state), expected)
    assert torch.equal(functional.dequantize_4bit(packed.t(), state), expected.t())
    assert launches() == 2


@pytest.mark.parametrize("more", [{"out": 1}, {"blocksize": 64}, {"quant_type": "nf4", "absmax": 1}], ids=str)
def test_other_arguments_are_left_to_bitsandbytes(launches: Callable[[], int], more: dict[str, Any]) -> None:
    packed, state = quantized()
    asked: list[Any] = []
    given = (packed, state) if "absmax" not in more else (packed,)
    bitsandbytes_fused_dequantization.dequantize_4bit(lambda *args, **kwargs: asked.append(kwargs), *given, **more)
    assert asked == [more]
    assert launches() == 0


def test_a_training_step(launches: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass dequantizes the weight again; gradients are those without the kernel."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(64, 96, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")

    def gradient() -> Any:
        given = torch.ones(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
        layer(given).square().sum().backward()
        return given.grad

    found = gradient()
    assert launches() > 1
    monkeypatch.delitem(kernels.COMPILERS, "cpu")
    assert torch.equal(found, gradient())
    assert launches() == 0


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products(launches: Callable[[], int], nested: bool, bias: bool) -> None:
    """What replaces ``_dequant_linear_fallback``, whose module exists only where there is a GPU."""
    packed, state = quantized(nested)
    given = torch.randn(2, 7, 64).bfloat16()
    added = torch.randn(96).bfloat16() if bias else None
    absmax, more = state.absmax, {}
    if nested:
        absmax = state.state2.absmax
        more = {"absmax_8bit": state.absmax, "absmax_code": state.state2.code, "absmax_offset": state.offset}
    asked: list[Any] = []

    def original(*args: Any, **kwargs: Any) -> str:
        asked.append((args, kwargs))
        return "bitsandbytes"

    def call(blocksize: int = 64) -> Any:
        args = (given, packed, [96, 64], absmax, blocksize, "nf4", added)
        return bitsandbytes_fused_dequantization.dequantized_linear(original, *args, **more)

    found = call()
    layout = Format("nf4", 64, 256 if nested else 0, torch.bfloat16)
    scales = (absmax,) if not nested else (state.absmax, absmax, state.state2.code, state.offset)
    assert torch.equal(found, torch.nn.functional.linear(given, computed(packed, (96, 64), layout, scales), added))
    assert launches() == 2
    assert asked == []
    assert call(blocksize=96) == "bitsandbytes"
    ((args, kwargs),) = asked
    assert args[:2] == (given, packed)
    assert args[2:] == ([96, 64], absmax, 96, "nf4", added)
    assert {name: value for name, value in kwargs.items() if value is not None} == more


def test_compiled_code_is_left_alone(launches: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    packed, state = quantized()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert dequantizing.of_state(packed, state) is None
    assert launches() == 0
