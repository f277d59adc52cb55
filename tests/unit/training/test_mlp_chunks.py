"""A module applied to a few tokens at a time against the same on all of them: values, gradients, what is kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gemma4_compat import Gemma4CompatWarning  # noqa: E402
from gemma4_compat._plan.training_step import storage_counter  # noqa: E402
from gemma4_compat._training import mlp_chunks  # noqa: E402

ROWS, WIDTH, WIDE = 37, 16, 96
#: Of a norm. The plain module in 16 bits is off by up to 0.01 from float64.
BOUND = {torch.float32: 1e-6, torch.bfloat16: 0.02, torch.float16: 0.002}


class Mlp(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Upstream's, with dropout."""

    def __init__(self, dropout: float = 0.0, wide: int = WIDE) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(WIDTH, wide, bias=False)
        self.up_proj = torch.nn.Linear(WIDTH, wide, bias=False)
        self.down_proj = torch.nn.Linear(wide, WIDTH, bias=False)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        gate = torch.nn.functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(self.dropout(gate * self.up_proj(x)))


def data(dtype: Any = torch.float32, *, shape: tuple[int, ...] = (1, ROWS), **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    mlp = Mlp(**options).to(dtype)
    inputs = torch.randn(*shape, WIDTH).to(dtype).requires_grad_()
    return mlp, inputs, torch.randn(*shape, WIDTH).to(dtype)


def in_chunks(mlp: Any, inputs: Any, tokens: int = 5, **options: Any) -> Any:
    trained = tuple(weight for weight in mlp.parameters() if weight.requires_grad)
    return mlp_chunks.apply(mlp, inputs, tokens=tokens, trained=trained, module=mlp, **options)


def step(function: Callable[..., Any], mlp: Any, inputs: Any, gradient: Any) -> list[Any]:
    """Outputs and gradients; None for a weight without one."""
    found = [inputs, *mlp.parameters()]
    for tensor in found:
        tensor.grad = None
    outputs = function(mlp, inputs)
    outputs.backward(gradient)
    return [outputs.detach(), *(tensor.grad for tensor in found)]


def plain(mlp: Any, inputs: Any) -> Any:
    return mlp(inputs)


def off(found: Any, right: Any) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("tokens", [1, 5, 18, 100])
@pytest.mark.parametrize("shape", [(1, ROWS), (3, 11), (ROWS,)], ids=str)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_outputs_and_gradients(dtype: Any, shape: tuple[int, ...], tokens: int) -> None:
    mlp, inputs, gradient = data(dtype, shape=shape)
    right = step(plain, mlp, inputs, gradient)
    found = step(lambda *given: in_chunks(*given, tokens=tokens), mlp, inputs, gradient)
    assert right[2] is found[2] is None  # the unused one
    for one, other in zip(found, right, strict=True):
        if other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert off(one, other) <= BOUND[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_over_many_chunks_are_no_further_from_float64_than_one_product(dtype: Any) -> None:
    mlp, inputs, gradient = data(dtype, shape=(4, 200))
    found = {name: step(way, mlp, inputs, gradient) for name, way in (("plain", plain), ("chunks", in_chunks))}
    truth = step(plain, mlp.double(), inputs.detach().double().requires_grad_(), gradient.double())
    for index, right in enumerate(truth):
        if right is not None:
            assert off(found["chunks"][index], right) <= 1.2 * off(found["plain"][index], right)


@pytest.mark.parametrize("frozen", ["inputs", "weights", "both"])
def test_only_what_trains_gets_a_gradient(frozen: str) -> None:
    mlp, inputs, gradient = data()
    inputs.requires_grad_(frozen == "weights")
    mlp.requires_grad_(frozen == "inputs")
    if frozen == "both":
        inputs.requires_grad_(False)
        mlp.requires_grad_(False)
        outputs = in_chunks(mlp, inputs)
        assert not outputs.requires_grad
        assert off(outputs, mlp(inputs)) <= 1e-6
        return
    right, found = step(plain, mlp, inputs, gradient), step(in_chunks, mlp, inputs, gradient)
    assert [one is None for one in found] == [one is None for one in right]
    assert any(one is not None for one in found[1:])
    assert all(off(one, other) <= 1e-6 for one, other in zip(found, right) if other is not None)


def peak(function: Callable[..., Any], rows: int) -> int:
    """Bytes that live at most in a forward and a backward pass, without weights and inputs."""
    mlp, inputs, gradient = data(shape=(1, rows), wide=WIDTH * 32)
    mlp.requires_grad_(False)
    counted = storage_counter(mlp)
    counted._known |= {tensor.untyped_storage()._cdata for tensor in (inputs, gradient)}
    with counted:
        outputs = function(mlp, inputs)
        outputs.backward(gradient)
    assert inputs.grad is not None
    return int(counted.peak)


def test_the_intermediates_of_one_piece_exist_at_once() -> None:
    """Live bytes on the CPU: twice the tokens, twice the memory; in chunks, only that of inputs and outputs."""
    rows, tokens = 1024, 64
    states = rows * WIDTH * 4
    assert peak(plain, 2 * rows) == pytest.approx(2 * peak(plain, rows), rel=0.05)
    of_one = peak(plain, tokens)
    found = [peak(lambda *given: in_chunks(*given, tokens=tokens), count * rows) for count in (1, 2)]
    assert found[0] <= of_one + 3 * states  # outputs, and the gradient of the inputs
    assert found[1] - found[0] <= 3 * states
    assert found[0] < peak(plain, rows) / 5


def test_no_hook_sees_more_than_the_inputs() -> None:
    """Such as those that keep activations in host memory: they would copy what is computed again."""
    mlp, inputs, gradient = data()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: seen.append(kept) or kept, lambda kept: kept):
        in_chunks(mlp, inputs).backward(gradient)
    assert len(seen) == 1
    assert seen[0].data_ptr() == inputs.data_ptr()


def test_dropout_is_drawn_again() -> None:
    mlp, inputs, gradient = data(dropout=0.5)

    def by_hand(mlp: Any, inputs: Any) -> Any:
        parts = [inputs[:, ROWS * index // 8 : ROWS * (index + 1) // 8] for index in range(8)]
        return torch.cat([mlp(part) for part in parts], dim=1)

    torch.manual_seed(1)
    right = step(by_hand, mlp, inputs, gradient)
    after = torch.rand(1)
    torch.manual_seed(1)
    found = step(in_chunks, mlp, inputs, gradient)
    assert torch.rand(1) == after  # the backward pass has left no trace
    assert torch.equal(found[0], right[0])
    assert all(off(one, other) <= 1e-6 for one, other in zip(found, right) if other is not None)
    torch.manual_seed(2)
    assert not torch.equal(step(in_chunks, mlp, inputs, gradient)[0], right[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_that_of_the_forward(dtype: Any) -> None:
    mlp, inputs, gradient = data()

    def cast(function: Callable[..., Any]) -> Callable[..., Any]:
        def within(mlp: Any, inputs: Any) -> Any:
            with torch.autocast("cpu", dtype=dtype):
                return function(mlp, inputs).float()

        return within

    right, found = step(cast(plain), mlp, inputs, gradient), step(cast(in_chunks), mlp, inputs, gradient)
    exact = step(plain, mlp, inputs, gradient)
    assert off(right[0], exact[0]) > 1e-4
    for one, other in zip(found, right, strict=True):
        if other is not None:
            assert one.dtype == other.dtype == torch.float32
            assert off(one, other) <= BOUND[dtype]
    with torch.autocast("cpu", dtype=dtype):  # a weight that was cast for a chunk still has its gradient afterwards
        in_chunks(mlp, inputs)
        again = step(plain, mlp, inputs, gradient.to(dtype))
    assert all(off(one, other) <= BOUND[dtype] for one, other in zip(again[1:], right[1:]) if other is not None)


def test_a_graph_that_is_kept_runs_again() -> None:
    mlp, inputs, gradient = data()
    outputs = in_chunks(mlp, inputs)
    first = torch.autograd.grad(outputs, inputs, gradient, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(outputs, inputs, gradient)[0], first)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_of_gradients(dropout: float) -> None:
    """Computed as a whole, which is said once. The inputs depend on a weight of the module as well."""
    mlp, inputs, gradient = data(dropout=dropout)
    mlp.train()

    def penalty(function: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        scaled = inputs * mlp.down_proj.weight.mean()
        weights = [inputs, *(one for one in mlp.parameters() if one is not mlp.unused)]
        first = torch.autograd.grad(function(mlp, scaled), weights, gradient, create_graph=True)
        third = torch.autograd.grad(sum(one.square().sum() for one in first), weights, create_graph=True)
        return [*first, *third, *torch.autograd.grad(sum(one.square().sum() for one in third), weights)]

    right, several = penalty(plain), functools.partial(in_chunks, tokens=ROWS if dropout else 5)
    mlp_chunks._tell.cache_clear()
    with pytest.warns(Gemma4CompatWarning, match=r"create_graph=True.*train_fast\(model, mlp=False\)"):
        found = penalty(several)
    assert all(off(one, other) < 1e-5 for one, other in zip(found, right, strict=True))
    assert all(isinstance(one, torch.nn.Parameter) for one in mlp.parameters())
    assert all(off(one, other) < 1e-5 for one, other in zip(penalty(several), right, strict=True))  # no warning


def test_inputs_that_changed_are_noticed() -> None:
    """As everywhere in autograd; a backward pass from other inputs would be silently wrong."""
    mlp, inputs, gradient = data()
    states = inputs * 1
    outputs = in_chunks(mlp, states)
    with torch.no_grad():
        states += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.backward(gradient)


def test_weights_are_brought_in_once_forward_and_once_backward() -> None:
    mlp, inputs, gradient = data()
    entered = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    outputs = in_chunks(mlp, inputs, around=around)
    assert entered == ["in", "out"]
    outputs.backward(gradient)
    assert entered == ["in", "out"] * 2
