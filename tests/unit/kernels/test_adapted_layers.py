"""An adapter on a decoder layer: no more launches than without, and the bits of its operations one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import torch

from benchmarks.decoding.own_products import asked
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import custom, fusing
from gemma4_compat._kernels.programs import Kernel
from tests.unit.kernels.test_rows import CPU, Launching, adapted, drawn, low_rank, mean, norm, turned

Linear = Callable[[Any], Any]


class Noting:
    """A sink that only counts."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def accepts(self, _signature: Any) -> bool:
        return True

    def kernel(self, kernel: Kernel, _signatures: Any) -> None:
        self.kernels.append(kernel)


def linear(inputs: int, outputs: int, rank: int, dtype: Any, seed: int) -> Linear:
    """As PEFT's layer over one in 4 bits."""
    weight = asked(torch.bfloat16, inputs, outputs, seed=seed)
    del weight["given"]
    pair = low_rank(outputs, inputs, rank, dtype, seed) if rank else None

    def run(given: Any) -> Any:
        result = custom.operator("product")(given, **weight)
        return result if pair is None else adapted(result.clone(), given, pair)

    return run


def layer(
    *, hidden: int, heads: int, groups: int, width: int, inner: int, per_layer: int, rank: int, dtype: Any
) -> Callable[[Any, Callable[[Any], Any]], tuple[Any, ...]]:
    """A decoder layer with adapters on its seven linear layers; attention is a copy of the queries."""

    def adapter(inputs: int, outputs: int, seed: int) -> Linear:
        return linear(inputs, outputs, rank, dtype, seed)

    q, k, v = (adapter(hidden, count * width, seed) for seed, count in enumerate((heads, groups, groups)))
    o, gate, up = adapter(heads * width, hidden, 3), adapter(hidden, inner, 4), adapter(hidden, inner, 5)
    down = adapter(inner, hidden, 6)
    of_token, back = (linear(*sizes, 0, dtype, 7) for sizes in ((hidden, per_layer), (per_layer, hidden)))
    weights = [drawn(size, seed=10 + at) for at, size in enumerate((hidden, width, width, *[hidden] * 4))]

    def gelu(given: Any) -> Any:
        return torch.nn.functional.gelu(given, approximate="tanh")

    def run(states: Any, mean: Callable[[Any], Any]) -> tuple[Any, ...]:
        given = norm(states, weights[0], mean)
        queries = turned(norm(q(given).view(1, 1, heads, width), weights[1], mean)).transpose(1, 2)
        keys = turned(norm(k(given).view(1, 1, groups, width), weights[2], mean)).transpose(1, 2)
        values = norm(v(given).view(1, 1, groups, width), torch.ones(()), mean).transpose(1, 2)
        states = states + norm(o(queries.flip(0).transpose(1, 2).reshape(1, 1, -1)), weights[3], mean)
        given = norm(states, weights[4], mean)
        states = states + norm(down(gelu(gate(given)) * up(given)), weights[5], mean)
        states = states + norm(back(gelu(of_token(states)) * weights[2][:1]), weights[6], mean)
        return states, keys, values

    return run


SMALL = {"hidden": 128, "heads": 2, "groups": 1, "width": 64, "inner": 192, "per_layer": 64}
SHAPES: dict[str, dict[str, int]] = {
    "E2B": {"hidden": 1536, "heads": 8, "groups": 1, "width": 256, "inner": 6144, "per_layer": 256},
    "E4B": {"hidden": 2560, "heads": 8, "groups": 2, "width": 256, "inner": 10240, "per_layer": 256},
    "12B": {"hidden": 3840, "heads": 16, "groups": 8, "width": 256, "inner": 15360, "per_layer": 256},
}


def launched(sink: Any, run: Callable[[Any, Callable[[Any], Any]], Any], hidden: int) -> Any:
    states = drawn(1, 1, hidden, seed=3)
    with torch.no_grad(), fusing.Fusing(CPU, sink, {}) as mode, custom.CustomKernels(CPU):
        found = run(states, lambda given: given.mean(-1, keepdim=True))
        mode.flush()
    return found


@pytest.mark.parametrize(
    ("shape", "rank", "dtype", "more"),
    [
        ("E2B", 16, torch.float32, 0),
        ("E2B", 16, torch.bfloat16, 0),
        ("E2B", 64, torch.bfloat16, 0),
        ("E2B", 64, torch.float32, 2),  # B of o_proj and of down_proj
        ("E4B", 16, torch.float32, 0),
        ("12B", 16, torch.bfloat16, 0),
        ("12B", 16, torch.float32, 2),
    ],
)
def test_an_adapter_adds_no_launches_up_to_a_rank(shape: str, rank: int, dtype: Any, more: int) -> None:
    counts = []
    for of in (0, rank):
        sink = Noting()
        launched(sink, layer(**SHAPES[shape], rank=of, dtype=dtype), SHAPES[shape]["hidden"])
        counts.append(len(sink.kernels))
    assert counts == [13, 13 + more]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str)
def test_a_layer_with_an_adapter_has_the_bits_of_its_operations(on_host: kernels.Kernels, dtype: Any) -> None:
    run = layer(**SMALL, rank=8, dtype=dtype)
    with torch.no_grad(), custom.CustomKernels(CPU):
        expected = run(drawn(1, 1, SMALL["hidden"], seed=3), mean)
    sink = Launching(on_host)
    for one, other in zip(launched(sink, run, SMALL["hidden"]), expected, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    assert len(sink.kernels) == 13
