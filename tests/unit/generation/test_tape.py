"""The stand-in for a CUDA graph does what a graph does, so that tests of the decoder with it mean something."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from gemma4_compat._lab.stand_ins import tape
from gemma4_compat._lab.stand_ins.tape import Tape


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.count.add_(1)
        return self.linear(x).unflatten(-1, (1, 3)) * self.count


@pytest.fixture
def counter() -> Counter:
    torch.manual_seed(0)
    return Counter()


@pytest.fixture
def x() -> Any:
    return torch.ones(2, 3)


def test_a_replay_does_to_memory_what_the_step_did(counter: Counter, x: Any) -> None:
    tape = Tape()
    with torch.no_grad():
        output = tape.capture(lambda: counter(x))
        assert (counter.calls, counter.count.item()) == (1, 0)
        assert output.isnan().all()  # no kernel has run
        for step in (1, 2, 3):
            x.copy_(torch.full((2, 3), float(step)))
            tape.replay()
            assert counter.count.item() == step
            assert torch.equal(output, counter.linear(x).unflatten(-1, (1, 3)) * step)
    assert (counter.calls, tape.replays) == (1, 3)


def test_with_gradients_on_and_in_inference_mode(counter: Counter, x: Any) -> None:
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            tape = Tape()
            output = tape.capture(lambda: counter(x))
            counter.count.zero_()
            tape.replay()
            assert torch.equal(output, counter.linear(x).unflatten(-1, (1, 3)))
        tape.replay()
        assert counter.count.item() == 2


def test_memory_is_read_as_it_is_and_replaced_weights_are_not_seen(counter: Counter, x: Any) -> None:
    tape = Tape()
    with torch.no_grad():
        output = tape.capture(lambda: counter.linear(x))
        counter.linear.weight.mul_(2)
        tape.replay()
        expected = counter.linear(x)
        assert torch.equal(output, expected)
        kept = counter.linear.weight.detach(), counter.linear.bias.detach()
        counter.linear.weight.data = torch.zeros(3, 3)  # the same parameter, at another address
        tape.replay()
        assert torch.equal(output, expected)
        counter.linear = nn.Linear(3, 3)
        tape.replay()
        assert torch.equal(output, expected)
        del kept
        with pytest.raises(RuntimeError, match="memory that was freed"):
            tape.replay()


@pytest.mark.skipif(not hasattr(torch._C, "_storage_Use_Count"), reason="this PyTorch does not count holders")
def test_it_keeps_no_memory_alive_but_its_own(counter: Counter, x: Any) -> None:
    def held() -> list[int]:
        return [
            torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
            for tensor in (counter.count, counter.linear.weight, x)
        ]

    before, tape = held(), Tape()
    output = tape.capture(lambda: counter(x))
    assert held() == before
    tape.replay()
    assert held() == before
    own = StorageWeakRef(output.untyped_storage())
    del output
    assert not own.expired()
    del tape
    assert own.expired()


def test_shapes_that_change_in_place() -> None:
    total, tape = torch.zeros(2, 3), Tape()

    def step() -> Any:
        one = torch.ones(3)
        one.mul_(2)
        one.unsqueeze_(0)
        total.add_(one)
        return torch.cat([one, torch.zeros_like(total)])

    output = tape.capture(step)
    for count in (1, 2):
        tape.replay()
        assert torch.equal(total, torch.full((2, 3), 2.0 * count))
        assert output.shape == (3, 3)
        assert output[0].tolist() == [2, 2, 2]


def test_results_written_to_given_and_to_new_tensors(x: Any) -> None:
    given, tape = torch.zeros(2), Tape()

    def step() -> Any:
        new = torch.empty(2)
        torch.sum(x, 1, out=new)
        torch.sum(x, 1, out=given)
        return new, *torch.max(x, 1)

    new, largest, index = tape.capture(step)
    assert given.tolist() == [0, 0]
    x[0, 2] = 5
    tape.replay()
    assert given.tolist() == new.tolist() == [7, 3]
    assert (largest[0].item(), index[0].item()) == (5, 2)


def test_memory_without_a_kernel_that_writes_it_is_left_alone(x: Any) -> None:
    tape = Tape()

    def step() -> Any:
        given = torch.empty(3)
        return given, x + given

    given, output = tape.capture(step)
    given.fill_(4)
    tape.replay()
    assert torch.equal(output, torch.full((2, 3), 5.0))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: int(x[0, 0]),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.unique(),
        lambda x: x.unique_consecutive(),
        lambda x: x.unique(dim=0),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.__setitem__(x > 0, torch.ones(6)),
        lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x[:, 0].long(), dim=0),
        lambda x: x[torch.tensor([1])],
    ],
)
def test_what_a_capture_refuses(x: Any, operation: Callable[[Any], Any]) -> None:
    written, tape = torch.zeros(2), Tape()

    def step() -> None:
        written.add_(1)
        operation(x)

    def caught() -> None:
        with pytest.raises(RuntimeError):
            step()

    for run in (step, caught):  # an invalid capture stays one
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
            tape.capture(run)
        assert written.tolist() == [0, 0]
        assert torch.equal(x, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="without a capture"):
        tape.replay()


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (copy.deepcopy, "whose memory"),
        (lambda x: torch.empty(0).set_(x.untyped_storage()), "whose memory"),
        (lambda x: x.add_(torch.sparse_coo_tensor([[0], [1]], [2.0], x.shape)), "sparse|copies|capturing"),
        (lambda x: x.to_sparse_csr(), "sparse"),
    ],
)
def test_what_a_tape_cannot_record_changes_nothing(x: Any, operation: Callable[[Any], Any], reason: str) -> None:
    def caught() -> None:
        with pytest.raises(RuntimeError):
            operation(x)

    for run in (lambda: operation(x), caught):
        with pytest.raises(RuntimeError, match=reason):
            Tape().capture(run)
        assert torch.equal(x, torch.ones(2, 3))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.masked_fill(x > 0, 7),
        lambda x: x.__setitem__(x > 0, 7),
        lambda x: x[:, torch.arange(2)],
        lambda x: torch.where(x > 0, x, torch.tensor(-1.0)),
        lambda x: torch.where(x > 0, x, 0),
        lambda x: x.repeat_interleave(x[:, 0].long(), dim=0, output_size=2),
        lambda x: x.flatten().sort(),
    ],
)
def test_what_it_permits(x: Any, operation: Callable[[Any], Any]) -> None:
    tape, again = Tape(), x.clone()
    expected = operation(again)
    output = tape.capture(lambda: operation(x))
    tape.replay()
    for one, other in zip(_pytree.tree_leaves((expected, again)), _pytree.tree_leaves((output, x)), strict=True):
        assert one is other or torch.equal(one, other)


def test_an_error_restores(counter: Counter, x: Any) -> None:
    tape = Tape()

    def step() -> None:
        counter(x)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        tape.capture(step)
    assert (counter.calls, counter.count.item()) == (1, 0)
    assert "resize_" not in vars(torch.UntypedStorage)
    tape.capture(lambda: counter(x))
    tape.replay()
    assert counter.count.item() == 1


def test_one_capture_at_a_time_and_other_threads_run(counter: Counter, x: Any) -> None:
    errors: list[BaseException] = []

    def other() -> None:
        assert not torch.cuda.is_current_stream_capturing()
        counter.count.add_(10)
        storage = torch.ones(8).untyped_storage()
        storage.resize_(0)
        try:
            Tape().capture(lambda: None)
        except RuntimeError as error:
            errors.append(error)

    def step() -> Any:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert torch.cuda.is_current_stream_capturing()
        return counter(x)

    tape = Tape()
    tape.capture(step)
    assert ["only one capture" in str(error) for error in errors] == [True]
    assert counter.count.item() == 10
    tape.replay()
    assert counter.count.item() == 11


class Streamed:
    """Weights that come from the host for a step, into memory that is taken for it and given back."""

    def __init__(self) -> None:
        self.host, self.device, self.views = torch.arange(4.0), torch.empty(4), []
        self.views = [self.device[:2], self.device[2:]]
        self.free()

    def free(self) -> None:
        self.device.untyped_storage().resize_(0)

    def load(self) -> None:
        self.device.untyped_storage().resize_(16)
        self.device.copy_(self.host)

    def __call__(self, x: Any) -> Any:
        self.load()
        output = x * self.views[0] + self.views[1]
        self.free()
        return output


def test_memory_that_is_taken_and_freed_in_a_step() -> None:
    x, tape, streamed = torch.ones(2), Tape(), Streamed()
    output = tape.capture(lambda: streamed(streamed(x)))
    for _ in range(3):
        x.add_(1)
        streamed.host.mul_(2)
        tape.replay()
        assert streamed.device.untyped_storage().nbytes() == 0
        assert torch.equal(output, streamed(streamed(x)))


def test_memory_that_a_step_takes_for_the_first_time() -> None:
    x, tape = torch.ones(2), Tape()

    def step() -> Any:
        streamed = Streamed()  # an `empty` of the capture
        return streamed(x)

    output = tape.capture(step)
    tape.replay()
    assert output.tolist() == [2, 4]

    def results() -> Any:
        twice = x * 2
        output = twice + 1
        twice.untyped_storage().resize_(0)
        return output

    output = (tape := Tape()).capture(results)
    tape.replay()
    assert output.tolist() == [3, 3]


def test_memory_that_a_step_leaves_holds_garbage() -> None:
    tape, streamed = Tape(), Streamed()

    def step() -> Any:
        streamed(torch.ones(2))
        streamed.load()  # ahead, for the next step: the copy never ran

    tape.capture(step)
    assert streamed.device.isnan().all()


def test_freed_memory_is_not_read() -> None:
    x, streamed = torch.ones(2), Streamed()
    for free_now in (True, False):
        streamed.load()
        tape = Tape()
        tape.capture(lambda now=free_now: (x * streamed.views[0], now and streamed.free()))
        streamed.free()
        if free_now:
            streamed.load()  # the same values, elsewhere
        with pytest.raises(RuntimeError, match="memory that was freed"):
            tape.replay()


def test_after_a_capture_that_cannot_be_undone_another_one_may_begin(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, 3)

    def undo(_self: Any) -> None:
        raise ValueError("no memory")

    with monkeypatch.context() as broken:
        broken.setattr(tape._Recorder, "undo", undo)
        with pytest.raises(ValueError, match="no memory"):
            Tape().capture(lambda: x + 1)
    recorded = Tape()
    result = recorded.capture(lambda: counter(x))
    recorded.replay()
    assert torch.equal(result, counter.linear(x).unflatten(-1, (1, 3)))
