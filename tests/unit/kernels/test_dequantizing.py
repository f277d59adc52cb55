"""One kernel dequantizes a 4-bit weight, with bitsandbytes' bits."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("bitsandbytes")

import torch
from bitsandbytes import functional
from bitsandbytes.nn import Params4bit

from benchmarks.decoding.own_products import of_type
from gemma4_compat._engine.changes import upstream
from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import dequantizing
from gemma4_compat._kernels.specs import nf4_dequantize
from gemma4_compat._kernels.specs.expert_rows import Format
from gemma4_compat._lab.stand_ins import packed_weights
from tests.unit.kernels.host_kernels import HostCompiler

CPU = torch.device("cpu")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(params=["emulated", "stand-in"])
def compiler(request: Any, monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The kernel itself, and what a reproduction takes for it on a machine without a GPU."""
    found = HostCompiler if request.param == "emulated" else packed_weights.Compiler
    if (reason := found.unsupported_reason()) is not None:
        pytest.skip(reason)
    if found is HostCompiler and not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        pytest.skip("bitsandbytes before 0.50 rounds some blocks twice on a CPU")
    monkeypatch.setitem(kernels.COMPILERS, "cpu", found)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(dequantizing, "_launches", {})
    return found


def reference(packed: Any, shape: tuple[int, ...], layout: Format, scales: Any) -> Any:
    """As bitsandbytes' kernels for GPUs compute, step by step."""
    size = math.prod(shape)
    absmax = scales[0]
    if layout.nested:
        quantized, nested, codes, offset = scales
        absmax = codes[quantized.int()] * nested.repeat_interleave(layout.nested)[: quantized.numel()] + offset
    given = packed.reshape(-1).view(torch.uint8)
    numbers = torch.stack([given >> 4, given & 15], dim=1).reshape(-1).int()
    values = torch.tensor(of_type(layout.quant_type, "values"))[numbers]
    return (values * absmax.repeat_interleave(layout.blocksize)[:size]).to(layout.dtype).view(shape)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were launched, without those of trials."""
    found: list[Any] = []
    launch = kernels.Kernels.launch

    def noted(self: Any, kernel: Any) -> None:
        if not getattr(kernels.of(CPU).tests._here, "trying", False):
            found.append(kernel)
        launch(self, kernel)

    monkeypatch.setattr(kernels.Kernels, "launch", noted)
    return found


def quantized(
    shape: tuple[int, ...] = (96, 64), *, dtype: Any = torch.bfloat16, nested: bool = True, **more: Any
) -> tuple[Any, Any]:
    """The packed bytes and state of random values."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found: tuple[Any, Any] = functional.quantize_4bit(values, compress_statistics=nested, **more)
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("nested", [0, 256])
@pytest.mark.parametrize(("quant_type", "blocksize"), [("nf4", 64), ("fp4", 64), ("nf4", 32), ("fp4", 4096)])
def test_bits(compiler: Any, quant_type: str, blocksize: int, nested: int, dtype: Any) -> None:
    layout = Format(quant_type, blocksize, nested, dtype)
    signature = layout.signature(nf4_dequantize.OPERATION)
    found = kernels.of(CPU)
    assert found.prepare([], [signature])
    kernel, values, expected = nf4_dequantize.trial(signature, CPU)
    values.fill_(float("nan"))
    found.launch(kernel)
    assert same_bits(values, expected)
    packed, *scales, _, _ = kernel.tensors
    if compiler is HostCompiler:  # zeros may differ in sign
        assert torch.equal(values, reference(packed, tuple(values.shape), layout, scales))
    assert values.unique().numel() > 16


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_a_state_of_bitsandbytes(compiler: Any, launched: list[Any], storage: Any, nested: bool) -> None:
    packed, state = quantized((40, 1000), nested=nested, quant_type="nf4", quant_storage=storage)  # 625 blocks
    expected = upstream(functional.dequantize_4bit)(packed, state)
    parameter = Params4bit(packed, requires_grad=False, quant_state=state, bnb_quantized=True)
    for given, wanted in ((packed, expected), (parameter, expected), (packed.t(), expected.t())):
        found = dequantizing.of_state(given, state)
        assert found.stride() == wanted.stride()
        assert same_bits(found, wanted)
        assert type(found) is torch.Tensor
    assert len(launched) == 3


def test_each_weight_has_memory_of_its_own(compiler: Any) -> None:
    packed, state = quantized()
    one, other = (dequantizing.of_state(packed, state) for _ in range(2))
    one.zero_()
    assert other.any()


def _unknown_blocksize(packed: Any, state: Any) -> Any:
    state.blocksize = 96
    return packed, state


def _float64(packed: Any, state: Any) -> Any:
    state.dtype = torch.float64
    return packed, state


def _half_offset(packed: Any, state: Any) -> Any:
    state.offset = state.offset.half()
    return packed, state


def _half_scales(packed: Any, state: Any) -> Any:
    state.state2.dtype = torch.float16
    return packed, state


def _too_few_scales(packed: Any, state: Any) -> Any:
    state.absmax = state.absmax[:-1]
    return packed, state


def _scales_with_gaps(packed: Any, state: Any) -> Any:
    state.absmax = state.absmax.repeat_interleave(2)[::2]
    return packed, state


def _with_gaps(packed: Any, state: Any) -> Any:
    return packed.repeat(1, 2)[:, :1], state


def _misaligned(packed: Any, state: Any) -> Any:
    return torch.cat([packed[:1], packed])[1:], state


def _packed_for_the_cpu(packed: Any, state: Any) -> Any:
    state.packing_format_for_cpu = True
    return packed, state


def _on_meta(packed: Any, state: Any) -> Any:
    return packed.to("meta"), state


def _with_scales_on_meta(packed: Any, state: Any) -> Any:
    state.state2.absmax = state.state2.absmax.to("meta")
    return packed, state


UNKNOWN = [
    _unknown_blocksize,
    _float64,
    _half_offset,
    _half_scales,
    _too_few_scales,
    _scales_with_gaps,
    _with_gaps,
    _misaligned,
    _packed_for_the_cpu,
    _on_meta,
    _with_scales_on_meta,
]


@pytest.mark.parametrize("change", UNKNOWN, ids=lambda change: change.__name__.strip("_"))
def test_what_is_left_to_bitsandbytes(compiler: Any, launched: list[Any], change: Callable[..., Any]) -> None:
    assert dequantizing.of_state(*change(*quantized())) is None
    assert launched == []


def test_sizes_that_no_word_divides(compiler: Any) -> None:
    assert dequantizing.of_state(*quantized((3, 28))) is None
    assert dequantizing.of_state(*quantized((0, 64), nested=False)) is None


def test_operations_are_watched_one_by_one(compiler: Any, launched: list[Any]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    packed, state = quantized()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert dequantizing.of_state(packed, state) is None
    fake = FakeTensorMode().from_tensor(packed)
    assert dequantizing.of_state(fake, state) is None
    assert launched == []


def test_one_kernel_dequantizes_while_others_are_fused(compiler: Any, launched: list[Any]) -> None:
    """Weights are there before a step begins."""
    from gemma4_compat._kernels.match import fusing

    packed, state = quantized()
    expected = dequantizing.of_state(packed, state)
    sink: Any = mock.Mock(spec=("accepts", "kernel"))
    sink.accepts.return_value = False
    before = len(launched)
    with torch.no_grad(), fusing.Fusing(CPU, sink, {}):
        found = dequantizing.of_state(packed, state)
    assert len(launched) == before + 1
    assert same_bits(found, expected)


def test_a_capture_is_no_place_for_a_trial(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, state = quantized()
    layout = Format(state.quant_type, state.blocksize, state.state2.blocksize, state.dtype)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    own = kernels.of(CPU)
    with monkeypatch.context() as patch:
        patch.setattr(own, "_device", torch.device("cuda", 0))
        assert not dequantizing._is_exact(layout, own)
    assert layout not in own.tests.passed
    assert dequantizing.of_state(packed, state) is not None


def test_a_launch_is_remembered_until_something_else_is_there(
    compiler: Any, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By addresses: what has moved is looked at again, and what is remembered has a bound."""
    again: list[int] = []
    monkeypatch.setattr(kernels.Kernels, "again", lambda _self, _kernel: again.append)
    packed, state = quantized()
    for _ in range(3):
        dequantizing.of_state(packed, state)
    assert (len(launched), len(again)) == (1, 2)
    state.offset = state.offset.clone()
    dequantizing.of_state(packed, state)
    dequantizing.of_state(packed.clone(), state)
    state.dtype = torch.float16
    assert dequantizing.of_state(packed, state).dtype == torch.float16
    assert (len(launched), len(again)) == (4, 2)
    monkeypatch.setattr(dequantizing, "_MOST_LAUNCHES", 4)
    dequantizing.of_state(packed.clone(), state)
    assert len(dequantizing._launches) == 1


def _strided_bytes(packed: Any, state: Any) -> Any:
    return packed.as_strided(packed.shape, (2, 1)), state


def _bytes_of_another_dtype(packed: Any, state: Any) -> Any:
    return packed.reshape(-1).view(torch.int16)[: len(packed) // 4], state


def _strided_scales(packed: Any, state: Any) -> Any:
    state.absmax = state.absmax.as_strided(state.absmax.shape, (2,))
    return packed, state


def _half_offset_there(packed: Any, state: Any) -> Any:
    state.offset = state.offset.view(torch.int16)[:1].view(torch.float16).squeeze()
    return packed, state


@pytest.mark.parametrize(
    "change",
    [_strided_bytes, _bytes_of_another_dtype, _strided_scales, _half_offset_there],
    ids=lambda change: change.__name__.strip("_"),
)
def test_other_tensors_at_the_addresses_of_a_remembered_launch(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]
) -> None:
    """What is left to bitsandbytes without it is left to it then, as well."""
    again: list[int] = []
    monkeypatch.setattr(kernels.Kernels, "again", lambda _self, _kernel: again.append)
    packed, state = quantized()
    packed = torch.cat([packed, packed])[: len(packed)]  # in memory where a strided view has room, too
    state.absmax = torch.cat([state.absmax, state.absmax])[: len(state.absmax)]
    state.offset = state.offset.reshape(1)
    before = packed.data_ptr(), state.absmax.data_ptr(), state.offset.data_ptr()
    for _ in range(2):
        dequantizing.of_state(packed, state)
    assert len(again) == 1
    packed, state = change(packed, state)
    assert before == (packed.data_ptr(), state.absmax.data_ptr(), state.offset.data_ptr())
    assert dequantizing.of_state(packed, state) is None
    assert len(again) == 1


def test_weights_quantized_anew_in_place_are_those_that_are_dequantized(compiler: Any) -> None:
    packed, state = quantized()
    dequantizing.of_state(packed, state)
    other = -2 * torch.randn(96, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    new, new_state = functional.quantize_4bit(other, compress_statistics=True)
    packed.copy_(new)
    for old, now in ((state.absmax, new_state.absmax), (state.offset, new_state.offset)):
        old.copy_(now)
    state.state2.absmax.copy_(new_state.state2.absmax)
    expected = upstream(functional.dequantize_4bit)(new, new_state)
    assert same_bits(dequantizing.of_state(packed, state), expected)
    state.blocksize *= 2  # in another grouping of the same bytes
    assert not same_bits(dequantizing.of_state(packed, state), expected)


def test_new_kernels_are_tried_anew(compiler: Any, launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    packed, state = quantized()
    expected = upstream(functional.dequantize_4bit)(packed, state)
    for _ in range(2):
        monkeypatch.setattr(kernels, "_kernels", {})
        assert same_bits(dequantizing.of_state(packed, state), expected)


def test_other_bits_leave_it_to_bitsandbytes(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = nf4_dequantize.computed

    def computed(*args: Any) -> Any:
        found = original(*args)
        found[-1, -1] += 1
        return found

    monkeypatch.setattr(nf4_dequantize, "computed", computed)
    packed, state = quantized()
    with caplog.at_level(logging.INFO, "gemma4_compat"):
        for _ in range(2):
            assert dequantizing.of_state(packed, state) is None
    (said,) = caplog.messages
    assert "differs bitwise on cpu" in said


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), OSError("libnvrtc.so")], ids=repr)
def test_a_failure_leaves_it_to_bitsandbytes(
    compiler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def compiled(_self: Any, _texts: Any) -> Any:
        raise error

    monkeypatch.setattr(compiler, "compiled", compiled)
    with caplog.at_level(logging.INFO, "gemma4_compat"):
        for _ in range(2):
            assert dequantizing.of_state(*quantized()) is None
    (said,) = caplog.messages
    assert str(error) in said


def test_without_memory_for_a_trial_the_next_call_tries(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, state = quantized()
    with monkeypatch.context() as patched:

        def trial(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

        patched.setattr(nf4_dequantize, "trial", trial)
        assert dequantizing.of_state(packed, state) is None
    assert dequantizing.of_state(packed, state) is not None


def test_threads_try_once(compiler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trials, original = [], nf4_dequantize.trial

    def trial(*args: Any) -> Any:
        trials.append(args)
        return original(*args)

    monkeypatch.setattr(nf4_dequantize, "trial", trial)
    packed, state = quantized()
    expected = upstream(functional.dequantize_4bit)(packed, state)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(dequantizing.of_state(packed, state))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(same_bits(one, expected) for one in found)
    assert len(trials) == 1


def test_subnormal_products_are_zero_as_in_code_for_fast_math(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a CPU: what bitsandbytes' kernels for GPUs compute there."""
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    if (reason := HostCompiler.unsupported_reason()) is not None:
        pytest.skip(reason)
    layout = Format("nf4", 64, 0, torch.float32)
    scales = (torch.tensor([2e-38, 1e-40]),)
    packed = torch.arange(64, dtype=torch.uint8).view(-1, 1)
    result = torch.empty(2, 64)
    kernel = nf4_dequantize.kernel_of(packed, layout, scales, result)
    found = kernels.of(CPU)
    assert found.prepare([kernel.text], [])
    found.launch(kernel)
    exact = nf4_dequantize.computed(packed, (2, 64), layout, scales)
    is_normal = exact.abs() >= torch.finfo(torch.float32).tiny
    assert torch.equal(result, torch.where(is_normal, exact, 0.0))
    assert is_normal.any()
    assert exact[~is_normal].any()
