"""Rows of a full sliding cache are moved by one kernel, with the bits of PyTorch's copies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import gemma4_compat
from gemma4_compat._graphs import fused_steps
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.specs import shifting
from tests.unit.generation import calls
from tests.unit.generation.calls import Models
from tests.unit.kernels.host_kernels import HostCompiler

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)


def drawn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rows_moved(keys: Any, values: Any, new_keys: Any, new_values: Any) -> bool:
    """Whether a kernel moved the rows; they have the right bits in any case."""
    expected = [torch.cat((held[:, :, 1:], new), -2) for held, new in ((keys, new_keys), (values, new_values))]
    found = shifting.kernel_of(keys, values, new_keys, new_values)
    custom.operator("shift")(keys, values, new_keys, new_values, True)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    return found is not None


@pytest.mark.parametrize("word", shifting._WORDS)
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_a_trial_of_each_kernel(word: int, times: int) -> None:
    dtype = torch.bfloat16 if word == 2 else torch.float32
    assert kernels.of(CPU).prepare([], [(shifting.OPERATION, (word, times), dtype)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 8, 16), (3, 2, 8, 32), (1, 1, 512, 256), (2, 1, 5, 20), (1, 3, 33, 7), (1, 2, 1, 16), (1, 1, 3000, 24)],
)
def test_layers(shape: tuple[int, ...], dtype: Any) -> None:
    batch, heads, _, width = shape
    keys, values = drawn(*shape, dtype=dtype), drawn(*shape, dtype=dtype).neg()
    for turn in range(2):
        fresh = drawn(2, batch, 1, heads, width, dtype=dtype) + turn  # transposed, as a layer's are
        assert rows_moved(keys, values, *fresh.transpose(2, 3))


def test_a_new_row_within_other_numbers() -> None:
    keys, values = drawn(2, 2, 8, 16), drawn(2, 2, 8, 16)
    both = drawn(2, 1, 5, 16)
    assert rows_moved(keys, values, both[:, :, 1:3].transpose(1, 2), both[:, :, 3:].transpose(1, 2))
    unaligned = drawn(2 * 2 * 16 + 1)[1:].view(2, 2, 1, 16)
    assert rows_moved(keys, values, unaligned, unaligned.clone())


def test_what_does_not_suit_is_copied_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gemma4_compat")
    shifting._say.cache_clear()
    fresh = drawn(1, 2, 1, 16)
    for _ in range(2):
        strided = drawn(1, 8, 2, 16).transpose(1, 2)
        assert not rows_moved(strided, strided.clone(memory_format=torch.preserve_format), fresh, fresh)
    assert len([one for one in caplog.records if "no kernel suits" in one.message]) == 1
    assert not rows_moved(drawn(1, 2, 8, 16), drawn(1, 2, 8, 32), fresh, drawn(1, 2, 1, 32))


def test_a_kernel_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, change_file: Callable[[str, str, str], None]
) -> None:
    monkeypatch.setattr(kernels, "_kernels", {})
    change_file("shifting.cuh", "(at + 1u) * words]", "at * words]")
    keys, values, fresh = drawn(1, 1, 8, 16), drawn(1, 1, 8, 16), drawn(1, 1, 1, 16)
    assert rows_moved(keys, values, fresh, fresh)  # there is one, which has failed its trial
    assert kernels.of(CPU).inexact() == [f"{shifting.OPERATION} of torch.bfloat16"]


def test_the_trial_sees_a_missing_barrier(
    monkeypatch: pytest.MonkeyPatch, change_file: Callable[[str, str, str], None]
) -> None:
    """The emulator runs the threads of some blocks backwards."""
    monkeypatch.setattr(kernels, "_kernels", {})
    change_file("shifting.cuh", "__syncthreads();", "")
    assert not kernels.of(CPU).prepare([], [(shifting.OPERATION, (16, 2), torch.bfloat16)])


#: Calls whose sliding layers are full, or become so between two tokens: eager, captured and fused steps of each.
FULL: dict[str, Any] = {
    "greedy": lambda model, way: calls.generate(model, calls.text(model), way, new=8),
    "padded": lambda model, way: calls.generate(model, calls.text(model, batch=3), way, new=8),
    "beams": lambda model, way: calls.generate(model, calls.text(model), way, new=8, num_beams=3),
    "across the window": lambda model, way: calls.generate(model, calls.text(model, 3), way, new=calls.WINDOW + 8),
}


@pytest.fixture
def launched(tapes: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the layers whose rows a kernel has moved, apart from trials."""
    shapes = []
    launch = kernels.Kernels.launch

    def noted(self: kernels.Kernels, kernel: Any) -> None:
        if "\nshift<" in kernel.text and kernel.tensors[-1].shape[2] == calls.WINDOW:
            shapes.append(tuple(kernel.tensors[-1].shape))
        launch(self, kernel)

    monkeypatch.setattr(kernels.Kernels, "launch", noted)
    monkeypatch.setattr(fused_steps.Progress, "after", 2)
    return shapes


@pytest.mark.parametrize("way", FULL)
def test_fused_steps_have_pytorchs_bits(launched: list[tuple[int, ...]], models: Models, way: str) -> None:
    model = models.fresh()
    calls.compared(model, lambda options: [FULL[way](model, options)])
    assert (calls.steps(model).fused > 0, calls.steps(model).not_fused) == (True, ())
    assert {shape[0] for shape in launched} == {3 if way in ("padded", "beams") else 1}


@pytest.mark.parametrize("way", FULL)
def test_custom_kernels_have_the_bits_of_the_copies(
    launched: list[tuple[int, ...]], models: Models, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    found = FULL[way](gemma4_compat.decode_fast(models.fresh()), None)
    assert launched
    launched.clear()
    monkeypatch.setattr(shifting, "kernel_of", lambda *_: None)
    calls.assert_equal(found, FULL[way](gemma4_compat.decode_fast(models.fresh()), None))
    assert not launched


def test_kernels_that_fail_leave_it_to_the_copies(
    launched: list[tuple[int, ...]], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With custom kernels, where no comparison of steps would show it."""
    compiled = HostCompiler.compiled

    def fails(self: Any, texts: Any) -> Any:
        if any("shifting.cuh" in text for text in texts):
            raise RuntimeError("no such architecture")
        return compiled(self, texts)

    monkeypatch.setattr(HostCompiler, "compiled", fails)
    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(custom, "_broken", {})
    model = gemma4_compat.decode_fast(models.fresh())
    # They fail in the middle of a step. Before that, kernels have computed 4-bit products, where bitsandbytes did not
    # pack the weights for a kernel of its own (CPUs with AVX512-BF16): this one step has the bits of neither.
    failing = FULL["greedy"](model, None)
    assert calls.steps(model).not_fused[0] == "this package's kernels failed: no such architecture"
    expected, *_ = calls.compared(model, lambda options: [FULL["greedy"](model, options)], replays=True)
    assert torch.equal(failing.logits[0], expected.logits[0])
    distance = (failing.logits[1] - expected.logits[1]).abs().max()
    assert distance < 0.1 * expected.logits[1].abs().max()
