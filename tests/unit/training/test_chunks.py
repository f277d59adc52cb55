"""The cross entropy in chunks against the same on all logits: loss, gradients, what is kept, and when."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gemma4_compat import Gemma4CompatError  # noqa: E402
from gemma4_compat._training import chunks, modules  # noqa: E402

TOKENS, HIDDEN, WORDS = 37, 16, 50
#: Of the norm of a gradient. The plain loss in bfloat16 is off by up to 0.009 from float64.
BOUND = {torch.float32: 1e-6, torch.bfloat16: 0.02}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 5 tokens in bfloat16, blocks of 2."""
    monkeypatch.setattr(chunks, "LOGITS_BYTES", WORDS * 2 * 5)
    monkeypatch.setattr(chunks, "BLOCK_BYTES", WORDS * 4 * 2)


def plain(linear: Any, states: Any, targets: Any, soft_cap: float | None) -> Any:
    """What transformers computes, but for the division."""
    logits = linear(states)
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")


def data(dtype: Any, *, tokens: int = TOKENS) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    linear = torch.nn.Linear(HIDDEN, WORDS, bias=False).to(dtype)
    return linear, torch.randn(tokens, HIDDEN).to(dtype).requires_grad_(), torch.randint(WORDS, (tokens,))


def chunked(linear: Any, states: Any, targets: Any, soft_cap: float | None, **options: Any) -> Any:
    options = {"vocabulary": WORDS, "trained": modules.trained(linear), **options}
    return chunks.cross_entropy(linear, states, targets, soft_cap=soft_cap, **options)


def step(loss: Callable[..., Any], dtype: Any, soft_cap: float | None, *, train: bool = True) -> tuple[Any, ...]:
    linear, states, targets = data(dtype)
    linear.requires_grad_(train)
    total = loss(linear, states, targets, soft_cap)
    (total / 7).backward()
    return total.detach(), states.grad, linear.weight.grad


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("train", [False, True])
def test_loss_and_gradients(dtype: Any, soft_cap: float | None, train: bool) -> None:
    right = step(plain, dtype, soft_cap, train=train)
    found = step(chunked, dtype, soft_cap, train=train)
    assert found[0].dtype == torch.float32
    assert torch.allclose(found[0], right[0], rtol=1e-6)
    for one, other in zip(found[1:], right[1:], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype == dtype
            assert (one - other).norm() <= BOUND[dtype] * other.norm()


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_bfloat16_is_no_further_from_float64_than_the_plain_loss(soft_cap: float | None) -> None:
    linear, states, targets = data(torch.bfloat16)
    truth_linear, truth = linear.double(), states.detach().double().requires_grad_()
    logits = truth_linear(truth)
    logits = logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap
    (torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / 7).backward()
    right = (truth.grad, truth_linear.weight.grad)

    def off(loss: Callable[..., Any]) -> list[float]:
        found = step(loss, torch.bfloat16, soft_cap)[1:]
        return [((one - other).norm() / other.norm()).item() for one, other in zip(found, right, strict=True)]

    (states_off, weight_off), (states_upstream, weight_upstream) = off(chunked), off(plain)
    assert states_off <= 1.5 * states_upstream
    assert weight_off <= 3 * weight_upstream  # the sum of 8 chunks' gradients, in bfloat16


@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_deterministic_algorithms_change_no_bit(soft_cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is written by indices, which CUDA would sort."""
    written: list[Any] = []
    write = torch.Tensor.__setitem__
    monkeypatch.setattr(
        torch.Tensor, "__setitem__", lambda self, at, value: written.append(at) or write(self, at, value)
    )
    expected = step(chunked, torch.bfloat16, soft_cap)
    assert any(isinstance(at, tuple) for at in written)
    written.clear()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert all(map(torch.equal, step(chunked, torch.bfloat16, soft_cap), expected))
    assert not any(isinstance(at, tuple) for at in written)


def test_the_head_runs_once_a_chunk_and_sees_a_chunk() -> None:
    linear, states, targets = data(torch.bfloat16)
    shapes: list[Any] = []
    linear.register_forward_hook(lambda _module, inputs, _output: shapes.append(tuple(inputs[0].shape)))
    chunked(linear, states, targets, 2.0).backward()
    assert shapes == [(1, 5, HIDDEN)] * 7 + [(1, 2, HIDDEN)]


def test_a_head_of_several_modules_gets_smaller_chunks() -> None:
    linear, states, targets = data(torch.bfloat16)
    shapes: list[Any] = []
    linear.register_forward_hook(lambda _module, inputs, _output: shapes.append(inputs[0].shape[1]))
    chunked(linear, states, targets, 2.0, plain=False)
    assert set(shapes) == {1}


def test_without_gradients_nothing_is_kept_and_nothing_of_a_gradient_computed() -> None:
    linear, states, targets = data(torch.bfloat16)
    right = chunked(linear, states, targets, 2.0)
    asked = []
    linear.register_forward_hook(lambda *_: asked.append(torch.is_grad_enabled()))
    with torch.no_grad():
        found = chunked(linear, states, targets, 2.0)
    assert not any(asked)
    assert not found.requires_grad
    assert found == right


def test_what_is_kept_is_as_large_as_the_hidden_states() -> None:
    linear, states, targets = data(torch.bfloat16)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.nbytes) or tensor, lambda it: it):
        chunked(linear.requires_grad_(False), states, targets, 2.0)
    inside = 5 * HIDDEN * 2 + linear.weight.nbytes  # of one chunk's head, gone when it is done
    assert sum(kept) - states.nbytes <= 8 * inside


@pytest.mark.parametrize("kept", [True, False])
def test_two_backward_passes(kept: bool) -> None:
    linear, states, targets = data(torch.float32)
    total = chunked(linear, states, targets, 2.0)
    (total * 3).backward(retain_graph=True)
    first = states.grad.clone(), linear.weight.grad.clone()
    (total * 3).backward(retain_graph=kept)
    for found, one in zip((states.grad, linear.weight.grad), first, strict=True):
        assert torch.equal(found, 2 * one)
    if not kept:
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()


def test_a_torch_that_cannot_say_whether_the_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    right = step(chunked, torch.float32, 2.0)
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph", raising=False)
    found = step(chunked, torch.float32, 2.0)
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))


def test_a_second_derivative_is_refused() -> None:
    linear, states, targets = data(torch.float32)
    total = chunked(linear, states, targets, 2.0)
    with pytest.raises(Gemma4CompatError, match="second derivative"):
        torch.autograd.grad(total, states, create_graph=True)


def test_no_tokens() -> None:
    linear, states, _ = data(torch.float32)
    total = chunked(linear, states[:0], torch.zeros(0, dtype=torch.int64), 2.0)
    (total / 3).backward()
    assert total == 0
    assert torch.equal(states.grad, torch.zeros_like(states))


@pytest.mark.parametrize("state", ["mean", "nan"])
def test_no_tokens_of_a_mean(state: str) -> None:
    """Upstream's mean over nothing is NaN, with gradients of zero."""
    linear, states, _ = data(torch.float32)
    total = chunked(linear, states[:0], torch.zeros(0, dtype=torch.int64), 2.0) / 0
    assert total.isnan()
    total.backward()
    assert torch.equal(states.grad, torch.zeros_like(states))


def test_a_label_that_is_no_word() -> None:
    linear, states, targets = data(torch.float32)
    targets[3] = WORDS
    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        chunked(linear, states, targets, None)


def test_under_autocast() -> None:
    def run(loss: Callable[..., Any]) -> tuple[Any, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return step(loss, torch.float32, 2.0)

    right, found = run(plain), run(chunked)
    assert torch.allclose(found[0], right[0], rtol=1e-6)
    for one, other in zip(found[1:], right[1:], strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert (one - other).norm() <= BOUND[torch.bfloat16] * other.norm()


def test_a_scaled_loss_in_float16_keeps_small_gradients() -> None:
    """As torch.amp.GradScaler has it: gradients of the sum do not underflow where those of the mean would."""

    def run(loss: Callable[..., Any]) -> Any:
        linear, states, targets = data(torch.float16)
        (loss(linear, states, targets, 2.0) / 4096 * 65536).backward()
        return states.grad.float()

    right = run(functools.partial(plain))
    assert (run(chunked) - right).norm() <= 0.002 * right.norm()
