"""The number that stands for the values of tensors: whoever writes to them, and however, it is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from gemma4_compat._models import contents as values


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
    before = values.digest([other, tensor])
    assert values.digest([other, tensor.clone()]) == before
    write(tensor.data)
    assert values.digest([other, tensor]) != before


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
        before = values.digest([found])
        assert values.digest([found]) == before
        if found.numel():
            found.data.mul_(-2)
            assert values.digest([found]) != before
    with torch.inference_mode():
        assert len(values.digest([drawn(8), torch.nn.Parameter(drawn(8))])) == 1
    assert values.digest([torch.empty(3, device="meta")]) == ()


def test_two_tensors_exchanged() -> None:
    one, other = drawn(64, seed=1), drawn(64, seed=2)
    assert values.digest([one, other]) != values.digest([other, one])


def test_a_sample_is_of_the_whole_tensor() -> None:
    tensor = drawn(300, 300)
    before = values.sample(tensor)
    assert values.sample(tensor.clone()) == before
    for part in (tensor[:10], tensor[-10:], tensor[140:150]):
        found = values.sample(tensor)
        part.data.neg_()
        assert values.sample(tensor) != found
    assert values.sample(drawn(3)) != values.sample(drawn(3, seed=1))
    assert values.sample(drawn(0)) == ()
