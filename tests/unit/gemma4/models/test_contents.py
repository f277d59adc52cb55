"""Whether somebody has written to a tensor: what each of the three answers notices, and what it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from gemma4_compat._gemma4.state import contents


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swapped(tensor: Any, first: int, second: int) -> None:
    tensor[[first, second]] = tensor[[second, first]]


WRITES: dict[str, Callable[[Any], Any]] = {
    "one bit": lambda tensor: tensor.view(torch.uint8).view(-1)[17].bitwise_xor_(1),
    "the last byte": lambda tensor: tensor.view(torch.uint8).view(-1)[-1].bitwise_xor_(64),
    "negated": lambda tensor: tensor.neg_(),
    "every second one negated": lambda tensor: tensor[:, 1::2].neg_(),
    "two rows exchanged": lambda tensor: swapped(tensor, 0, -1),
    "rows reversed": lambda tensor: tensor.copy_(tensor.flip(0)),
    "columns reversed": lambda tensor: tensor.copy_(tensor.flip(1)),
    "two columns exchanged": lambda tensor: swapped(tensor.t(), 3, 4),
    "moved by a row": lambda tensor: tensor.copy_(tensor.roll(1, 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("shape", [(3, 5), (129, 64), (700, 1024)], ids=str)
def test_every_write_is_seen(shape: tuple[int, int], write: Callable[[Any], Any], dtype: Any) -> None:
    tensor, other = drawn(*shape, dtype=dtype), drawn(9)
    before = contents.digest([other, tensor])
    assert contents.digest([other, tensor.clone()]) == before
    write(tensor.data)
    assert contents.digest([other, tensor]) != before


def test_layouts_that_are_not_plain() -> None:
    base = drawn(40, 50)
    for found in (
        base.t(),
        base[3:, 1:7],
        base[:, 7],
        base.view(-1)[1:],
        base[0, 0],
        base[:0],
        base.bfloat16()[1:].t(),
    ):
        before = contents.digest([found])
        assert contents.digest([found]) == before
        if found.numel():
            found.data.mul_(-2)
            assert contents.digest([found]) != before
    with torch.inference_mode():
        assert len(contents.digest([drawn(8), torch.nn.Parameter(drawn(8))])) == 1
    assert contents.digest([torch.empty(3, device="meta")]) == ()


def test_two_tensors_exchanged() -> None:
    one, other = drawn(64, seed=1), drawn(64, seed=2)
    assert contents.digest([one, other]) != contents.digest([other, one])


def test_a_sample_is_of_the_whole_tensor() -> None:
    tensor = drawn(300, 300)
    before = contents.sample(tensor)
    assert contents.sample(tensor.clone()) == before
    for part in (tensor[:10], tensor[-10:], tensor[140:150]):
        found = contents.sample(tensor)
        part.data.neg_()
        assert contents.sample(tensor) != found
    assert contents.sample(drawn(3)) != contents.sample(drawn(3, seed=1))
    assert contents.sample(drawn(0)) == ()


#: Ways to write to a tensor, and which of ``stamp``, ``sampled`` and ``digest`` notice each.
NOTICED: dict[str, tuple[Callable[[Any], Any], tuple[bool, bool, bool]]] = {
    "an operation": (lambda tensor: tensor.mul_(2), (True, True, True)),
    "an operation on a view": (lambda tensor: tensor[3:].mul_(2), (True, True, True)),
    "an operation that changes nothing": (lambda tensor: tensor.mul_(1), (True, True, False)),
    "another .data": (lambda tensor: setattr(tensor, "data", tensor.data.clone().neg_()), (True, True, True)),
    "another layout": (lambda tensor: setattr(tensor, "data", tensor.data.t()), (False, False, False)),
    ".data": (lambda tensor: tensor.data.mul_(2), (False, True, True)),
    "a view of numpy": (lambda tensor: tensor.numpy().__imul__(2), (False, True, True)),
    "the storage": (lambda tensor: tensor.untyped_storage().fill_(1), (False, True, True)),
    "one number by .data": (lambda tensor: tensor.data.view(-1)[1].neg_(), (False, False, True)),
}


@pytest.mark.parametrize("how", NOTICED)
def test_what_each_answer_notices(how: str) -> None:
    write, noticed = NOTICED[how]
    tensor = drawn(300, 300)
    answers: tuple[Callable[[], Any], ...] = (
        lambda: contents.stamp(tensor),
        lambda: contents.sampled(tensor),
        lambda: contents.digest([tensor]),
    )
    before = [answer() for answer in answers]
    assert [answer() for answer in answers] == before
    write(tensor)
    assert tuple(answer() != one for answer, one in zip(answers, before)) == noticed


def test_an_inference_tensor_has_a_stamp() -> None:
    with torch.inference_mode():
        assert contents.stamp(drawn(3))[1] is None


def test_tensors_of_an_output() -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    assert list(contents.tensors_in((a, None, {"x": b, "y": [c, "text"]}))) == [a, b, c]
    assert list(contents.tensors_in(None)) == []
