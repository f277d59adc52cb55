"""Large results of a training layer are computed where they are needed, with the bits of single operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._gemma4.state import contents
from gemma4_compat._graphs import recording
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.fuse import pointwise, run_writer
from gemma4_compat._kernels.fuse.pointwise import Value
from gemma4_compat._kernels.match.on_demand import OnDemand
from gemma4_compat._kernels.programs import Kernel, name_of
from tests.unit.kernels import test_rows
from tests.unit.kernels.test_rows import CPU, Launching, drawn, turned

TOKENS, HIDDEN, HEADS, WIDTH, INNER, RANK = 32, 256, 2, 128, 384, 4


class Alone(OnDemand):
    """Computes each operation at once, by a kernel of its own."""

    def _add(self, value: Value, result: Any) -> None:
        super()._add(value, result)
        self._compute(value)


class Noting(Launching):
    """Launches nothing that is not compiled: kernels of a run are compiled together, which takes less time."""

    def kernel(self, kernel: Kernel, _signatures: Any) -> None:
        if self.known.is_prepared(kernel.text):
            self.known.launch(kernel)
        self.kernels.append(kernel)


def launched(sink: Launching, run: Callable[[], Any], kind: type[OnDemand], weights: Sequence[Any]) -> Any:
    """Copies of what a function returns inside the mode, contiguous."""
    with kind(CPU, sink, {}, weights) as mode:
        copies = [torch.empty(one.shape, dtype=one.dtype).copy_(one.detach()) for one in run()]
        mode.flush()
    return copies


def compared(
    known: kernels.Kernels, run: Callable[[], Any], weights: Sequence[Any] = ()
) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels of a run, whose results have the bits of its operations one by one, and are about PyTorch's; and
    those of its operations.
    """
    both = OnDemand, Alone
    for _ in range(2):
        sinks = [Noting(known) for _ in both]
        found, alone = (launched(sink, run, kind, weights) for sink, kind in zip(sinks, both))
        known.prepare([kernel.text for sink in sinks for kernel in sink.kernels], [])
    for one, other, right in zip(found, alone, run(), strict=True):
        assert one.dtype == right.dtype
        assert torch.equal(one, other)
        torch.testing.assert_close(one, right, rtol=0.05, atol=0.05)
    return sinks[0].kernels, sinks[1].kernels


def exactly(known: kernels.Kernels, run: Callable[[], Any]) -> list[str]:
    """The names of the kernels of a run whose operations have the bits of a CPU, without the one that writes copies of
    its results.
    """
    sink = Launching(known)
    found = launched(sink, run, OnDemand, ())
    for one, right in zip(found, run(), strict=True):
        assert same_bits(one, right.contiguous())
    return [name for name in (name_of(kernel.text) for kernel in sink.kernels) if name != "fused"]


def norm(given: Any, weight: Any) -> Any:
    return test_rows.norm(given, weight, test_rows.pytorchs)


class Layer:
    """A decoder layer with an adapter in float32, of which a part is frozen: heads, an MLP and residuals."""

    def __init__(self, scale: float = 2.0, hidden: int = HIDDEN) -> None:
        self.scale = scale
        shapes = [(HEADS * WIDTH, hidden), (hidden, HEADS * WIDTH), (INNER, hidden), (INNER, hidden), (hidden, INNER)]
        self.frozen = [drawn(*shape, seed=number) / 16 for number, shape in enumerate(shapes)]
        pairs = [((RANK, inputs), (outputs, RANK)) for outputs, inputs in shapes]
        self.trained = [
            torch.nn.Parameter(drawn(*shape, seed=20 + number).float() / 8)
            for number, pair in enumerate(pairs)
            for shape in pair
        ]
        self.norms = [drawn(width, seed=40 + width) for width in (hidden, WIDTH, hidden, hidden)]
        self.given, self.incoming = (drawn(1, TOKENS, hidden, seed=seed) for seed in (50, 51))
        self.angles = drawn(1, TOKENS, 1, WIDTH, seed=52)

    def linear(self, given: Any, number: int) -> Any:
        low, high = self.trained[2 * number : 2 * number + 2]
        result = torch.nn.functional.linear(given, self.frozen[number])
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            adapted = torch.nn.functional.linear(torch.nn.functional.linear(given.to(low.dtype), low), high)
        return result + adapted * self.scale

    def forward(self, given: Any) -> Any:
        heads = self.linear(norm(given, self.norms[0]), 0).view(1, -1, HEADS, WIDTH)
        heads = turned(norm(heads, self.norms[1]) * self.angles).transpose(1, 2)
        mixed = (heads @ heads.transpose(2, 3) / 64).softmax(-1) @ heads
        given = given + norm(self.linear(mixed.transpose(1, 2).reshape(1, -1, HEADS * WIDTH), 1), self.norms[2])
        normed = norm(given, self.norms[3])
        gate = torch.nn.functional.gelu(self.linear(normed, 2), approximate="tanh")
        given = given + self.linear(gate * self.linear(normed, 3), 4)
        given *= 0.5
        return given

    def passes(self) -> list[Any]:
        """The output, and all gradients."""
        given = self.given.requires_grad_()
        found = self.forward(given)
        return [found, *torch.autograd.grad(found, [given, *self.trained], self.incoming)]


def moved(several: Sequence[Kernel]) -> int:
    """Bytes that kernels read and write."""
    tensors = [tensor for kernel in several for tensor in kernel.tensors]
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)


@pytest.mark.parametrize("scale", [2.0, pytest.param(1.0, marks=pytest.mark.full)])
def test_a_layer_forward_and_backward(on_host: kernels.Kernels, scale: float) -> None:
    layer = Layer(scale)
    fused, alone = compared(on_host, layer.passes, layer.trained)
    assert 7 * len(fused) < len(alone)
    assert 4 * moved(fused) < moved(alone)
    written = [one for kernel in fused for one in kernel.tensors[-kernel.written :] if one.dtype == torch.float32]
    large = {one.shape for one in written if one.numel() > TOKENS * HEADS}
    assert large == {one.shape for one in layer.trained}  # gradients: no casts are written
    assert any(len(kernel.sizes) > 1 for kernel in fused)  # weights share a kernel
    assert all(len(kernel.sizes) == 1 for kernel in fused if name_of(kernel.text) != "fused")


@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (100, 1536), pytest.param(50, 5376, marks=pytest.mark.full)])
def test_warps_add_in_cudas_order(on_host: kernels.Kernels, rows: int, columns: int) -> None:
    assert run_writer.is_added_by_warps(rows, columns)
    given = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    values = [test_rows.of_rows(name, given) for name in pointwise.OF_ROWS]
    for value in values:
        kernel = run_writer.kernel_of([value])
        on_host.prepare([kernel.text], [])
        on_host.launch(kernel)
    assert torch.equal(values[0].memory, test_rows.mean(given))
    assert torch.equal(values[1].memory, test_rows.total(given))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1536), (8, 256), (100, 64), (100, 130), (100, 20000)])
def test_other_rows_are_left_to_pytorch(on_host: kernels.Kernels, rows: int, columns: int) -> None:
    """Of few rows more threads add each; of short ones each thread every fourth number."""
    assert not run_writer.is_added_by_warps(rows, columns)
    given = torch.randn(rows, columns)
    assert exactly(on_host, lambda: [given.mean(-1, keepdim=True)]) == []


def test_numbers_that_lie_in_any_way(on_host: kernels.Kernels) -> None:
    """Of any count, beginning anywhere, repeated along rows and columns, turned, cut, and in the middle of zeros."""
    whole, mask = drawn(6, 40), drawn(6, 40, seed=1) > 0
    column, row = drawn(6, 1, seed=2), drawn(40, seed=3)

    def run() -> list[Any]:
        cut, odd = whole[:, 8:24], whole.view(-1)[1:16]
        joined = torch.cat((-(cut * 3.0), cut * 2.0), dim=-1) + torch.cat((whole[:, :3] * 2.0, whole[:, 11:]), dim=-1)
        padded = torch.ops.aten.slice_backward(cut * 2.0, [6, 40], 1, 8, 24, 1)
        below = torch.ops.aten.slice_backward(row[None] * 2.0, [6, 40], 0, 5, 6, 1)
        found = [
            whole * column + row,
            odd + odd.float(),
            (odd * 2.0)[3:] * odd[3:],
            whole.T * 2.0,
            (whole.T * row[:, None]).float() + whole.T,
            joined,
            padded + below,
            torch.where(mask, whole * 2.0, torch.scalar_tensor(-1.0, dtype=whole.dtype)),
        ]
        return [one.flip(0) for one in found]  # which needs them

    assert exactly(on_host, run) == [run_writer.NAME] * 8


def test_results_are_there_in_time(on_host: kernels.Kernels) -> None:
    """Before what they are computed from is overwritten, or their own memory; and if nobody needs them, never."""
    given, buffers = drawn(4, 8), [torch.zeros(4, 8), torch.zeros(4, 8).bfloat16()]

    def run() -> list[Any]:
        x = given.clone()
        twice, unread = x * 2.0, x * 5.0
        kept = [twice[1:], twice + x]
        x.zero_()
        buffers[0].copy_(twice + 1.0)
        buffers[1].copy_(twice * 3.0)
        again = buffers[0] * 2.0
        buffers[0].copy_(buffers[1])
        part = twice * 7.0
        part[0] *= 2.0
        whole = twice - 1.0
        before = whole * 4.0
        whole *= 3.0
        assert unread.shape == x.shape
        return [x, *kept, again, part, whole, before, *buffers]

    exactly(on_host, run)


def test_a_copy_of_a_cast_back_is_not_written(on_host: kernels.Kernels) -> None:
    """Another operation reads what was cast, also turned around, and multiplied by 1."""
    given = drawn(8, 16)
    assert exactly(on_host, lambda: [given.float().bfloat16() @ (given.float().bfloat16() * 1.0).T]) == []
    assert len(exactly(on_host, lambda: [(given * 2.0).float().bfloat16() @ given.T])) == 1
    assert len(exactly(on_host, lambda: [given.float().half().float().bfloat16() @ given.T])) == 1  # other numbers


def test_means_of_other_rows_are_computed_before(on_host: kernels.Kernels) -> None:
    given = drawn(1, 32, 2, 128)

    def run() -> list[Any]:
        heads = norm(given, drawn(128, seed=1))
        return [heads + heads.flip(2), norm(heads.view(1, 32, 256), drawn(256, seed=2))]

    fused, _ = compared(on_host, run)
    assert [kernel.sizes for kernel in fused if name_of(kernel.text) == run_writer.OF_ROWS] == [(64,), (32,)]


class Living(TorchDispatchMode):
    """Notes the most bytes of tensors that operations made inside it and that lived at a time."""

    ignores_launches = True

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, Any] = {}

    def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **kwargs or {})
        given = {one.untyped_storage()._cdata for one in contents.tensors_in((args, kwargs))}
        for one in contents.tensors_in(result):
            storage = one.untyped_storage()
            if storage._cdata not in given and one.device == CPU:
                self._made[storage._cdata] = StorageWeakRef(storage)
        living = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self._made.values()]
        self.peak = max(self.peak, sum(one.nbytes() for one in living if one is not None))
        return result


def test_a_layer_takes_no_more_memory() -> None:
    """Although garbage is not collected in a capture."""
    layer, peaks = Layer(hidden=1536), []
    buffers = [torch.empty(one.shape, dtype=one.dtype) for one in layer.passes()]
    for fuses in (False, True):
        mode = OnDemand(CPU, Unseen(), {}, layer.trained) if fuses else contextlib.nullcontext()
        with recording.without_collection(), Living() as living, mode:
            found = layer.passes()
            while found:
                buffers[len(found) - 1].copy_(found.pop().detach())
            if fuses:
                mode.flush()
        peaks.append(living.peak)
    assert 0 < peaks[1] <= peaks[0]


class Unseen:
    """A sink that keeps nothing of what it gets."""

    def accepts(self, _signature: Any) -> bool:
        return True

    def kernel(self, _kernel: Kernel, _signatures: Any) -> None:
        """Nothing."""
