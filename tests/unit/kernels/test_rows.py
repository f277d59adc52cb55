"""Kernels with a block for each row: means in the order of CUDA's reduction, and norms around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.fuse import pointwise, row_kernels
from gemma4_compat._kernels.fuse.pointwise import Load, Value
from gemma4_compat._kernels.match import custom, fusing
from gemma4_compat._kernels.programs import Kernel, name_of
from gemma4_compat._kernels.specs import dense, products

CPU = torch.device("cpu")


def mean(given: Any) -> Any:
    """Row by row as CUDA does it: the sum, times the reciprocal."""
    return total(given) * (torch.tensor(1.0) / given.shape[-1])


def total(given: Any) -> Any:
    """Row by row as ``Reduce.cuh`` adds: four sums a thread, then halves of the threads, then a warp."""
    rows, columns = given.reshape(-1, given.shape[-1]).shape
    found = pointwise.order(rows, columns)
    assert found is not None
    flat = given.reshape(rows, columns)
    turns = pointwise.turns(columns, found)
    room = found.threads * (4 if found.vector else 1) * turns
    padded = torch.nn.functional.pad(flat, (0, room - columns))
    sums = torch.zeros(rows, 4, found.threads)
    if found.vector:
        for turn in padded.reshape(rows, turns, found.threads, 4).unbind(1):
            sums = sums + turn.transpose(1, 2)
    else:
        for number, turn in enumerate(padded.reshape(rows, turns, found.threads).unbind(1)):
            sums[:, number % 4] = sums[:, number % 4] + turn
    whole = ((sums[:, 0] + sums[:, 1]) + sums[:, 2]) + sums[:, 3]
    while whole.shape[1] > 1:
        half = whole.shape[1] // 2
        whole = whole[:, :half] + whole[:, half:]
    return whole.reshape(*given.shape[:-1], 1)


#: Rows and columns: fewer threads than a warp's worth of columns, vectors, several warps, 12 rows of heads; rows of
#: prompts, which one or more warps add up and several compute.
SHAPES = [(1, 32), (3, 96), (1, 128), (12, 256), (8, 512), (1, 1536), (2, 2560), (1, 5376)]
SHAPES += [(9, 1536), (64, 1536), (17, 2560), (40, 5376), (64, 768)]


def of_rows(name: str, given: Any) -> Value:
    """Their means, or sums."""
    rows, columns = given.shape
    value = Value(name, (Load(given, (columns, 1)),), (rows, 1), torch.float32, columns=columns)
    value.memory = torch.empty(rows, 1)
    return value


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_means_and_sums_are_added_in_cudas_order(on_host: kernels.Kernels, rows: int, columns: int) -> None:
    given = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    values = [of_rows(name, given) for name in pointwise.OF_ROWS]
    several = [kernel for value in values for kernel in row_kernels.kernels_of([value])]
    on_host.prepare([kernel.text for kernel in several], [])
    for kernel in several:
        on_host.launch(kernel)
    assert torch.equal(values[0].memory, mean(given))
    assert torch.equal(values[1].memory, total(given))


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (1, 130), (64, 20000)])
def test_other_shapes_are_left_to_pytorch(rows: int, columns: int) -> None:
    assert pointwise.order(rows, columns) is None


class Launching:
    """A sink that launches at once, and keeps what it launched."""

    def __init__(self, known: kernels.Kernels) -> None:
        self.known, self.kernels = known, []  # type: ignore[var-annotated]

    def accepts(self, _signature: Any) -> bool:
        return True

    def kernel(self, kernel: Kernel, _signatures: Any) -> None:
        self.known.prepare([kernel.text], [])
        self.known.launch(kernel)
        self.kernels.append(kernel)


def drawn(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def norm(given: Any, weight: Any, mean: Callable[[Any], Any]) -> Any:
    """``Gemma4RMSNorm``."""
    wide = given.float()
    return (wide * torch.pow(mean(wide.pow(2)) + 1e-6, -0.5) * weight.float()).to(given.dtype)


def turned(given: Any) -> Any:
    """Rotary embeddings, as far as they take numbers from elsewhere in the row."""
    half = given.shape[-1] // 2
    return torch.cat((-given[..., half:], given[..., :half]), -1) * 0.5 + given


def layer(mean: Callable[[Any], Any], tokens: int = 1, columns: int = 256) -> tuple[Any, ...]:
    """A norm, a residual and the next norm; and heads."""
    shape = 1, tokens, columns
    residual = drawn(*shape, seed=1) + norm(drawn(*shape), drawn(columns, seed=2), mean)
    heads = norm(drawn(1, tokens, 4, 64, seed=3), drawn(64, seed=4), mean)
    return residual, norm(residual, drawn(columns, seed=5), mean), turned(heads).transpose(1, 2)


def pytorchs(given: Any) -> Any:
    return given.mean(-1, keepdim=True)


def fused(known: kernels.Kernels, run: Callable[[], Any]) -> tuple[Any, list[Kernel]]:
    sink = Launching(known)
    with torch.no_grad(), fusing.Fusing(CPU, sink, {}) as mode:
        found = run()
        mode.flush()
    return found, sink.kernels


def test_norms_of_a_layer_are_one_kernel(on_host: kernels.Kernels) -> None:
    found, launched = fused(on_host, lambda: layer(pytorchs))
    for one, other in zip(found, layer(mean), strict=True):
        assert torch.equal(one, other)
    (kernel,) = launched
    assert (kernel.written, kernel.blocks) == (3, (1 + 4, 1))  # a row of 256, and four heads of 64


def test_more_threads_compute_the_rows_of_a_prompt(on_host: kernels.Kernels) -> None:
    """PyTorch has a warp add 768 numbers of each of 32 rows: 24 a thread."""
    tokens, columns = 32, 768
    found, launched = fused(on_host, lambda: layer(pytorchs, tokens, columns))
    for one, other in zip(found, layer(mean, tokens, columns), strict=True):
        assert torch.equal(one, other)
    (kernel,) = launched
    order = pointwise.order(tokens, columns)
    assert order is not None
    assert kernel.block > order.threads == pointwise.WARP
    assert kernel.blocks == (tokens * (1 + 4), 1)


def test_a_mean_of_other_rows_is_computed_before(on_host: kernels.Kernels) -> None:
    def run(mean: Callable[[Any], Any]) -> Any:
        heads = norm(drawn(1, 1, 4, 64, seed=3), drawn(64, seed=4), mean)
        return heads.transpose(1, 2).flip(1) + heads.transpose(1, 2).clone()

    found, launched = fused(on_host, lambda: run(pytorchs))
    assert torch.equal(found, run(mean))
    assert launched


def low_rank(outputs: int, inputs: int, rank: int = 4, dtype: Any = torch.float32, seed: int = 6) -> tuple[Any, Any]:
    """An adapter's A and B, as parameters."""
    shapes = (rank, inputs), (outputs, rank)
    return tuple(torch.nn.Parameter(drawn(*shape, seed=seed + at).to(dtype)) for at, shape in enumerate(shapes))  # type: ignore[return-value]


def adapted(result: Any, given: Any, *adapters: tuple[Any, Any], bias: Any = None) -> Any:
    """What PEFT adds to a layer's result."""
    linear = torch.nn.functional.linear
    for low, high in adapters:
        found = linear(linear(given.to(low.dtype), low), high, bias) * 2.0
        result = result + found.to(result.dtype)
    return result


def as_alone(on_host: kernels.Kernels, run: Callable[[Callable[[Any], Any]], Any]) -> list[Kernel]:
    """The kernels of a run, after comparing it with its operations one by one."""
    with torch.no_grad(), custom.CustomKernels(CPU):
        expected = run(mean)
        found, launched = fused(on_host, lambda: run(pytorchs))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    return launched


@pytest.mark.parametrize(
    ("rank", "dtype", "tokens"),
    [
        (16, torch.float32, 1),
        (24, torch.bfloat16, 3),
        pytest.param(4, torch.float32, 3, marks=pytest.mark.full),
        pytest.param(16, torch.bfloat16, 1, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_an_adapters_product_is_computed_by_the_block_of_the_norm(
    on_host: kernels.Kernels, rank: int, dtype: Any, tokens: int
) -> None:
    given, weight, residual = drawn(1, tokens, 256), drawn(256, seed=5), drawn(1, tokens, 256, seed=9)
    pairs = low_rank(256, 256, rank, dtype), low_rank(256, 256, rank, dtype, seed=20)
    bias = drawn(256, seed=30).to(dtype)

    def run(mean: Callable[[Any], Any]) -> Any:
        found = residual + norm(adapted(given, given, *pairs, bias=bias), weight, mean)
        return found, norm(found, weight, mean)

    a, norms = as_alone(on_host, run)
    assert ("staged" in a.text, "staged" in norms.text) == (False, True)
    assert norms.blocks == (tokens, 1)


def test_heads_with_an_adapter_are_one_kernel(on_host: kernels.Kernels) -> None:
    """Queries with rotary embeddings, keys, and values, which in some layers are the keys before their norm."""
    given, weight = drawn(1, 1, 128), drawn(64, seed=5)
    q, k = low_rank(256, 128), low_rank(128, 128, seed=20)
    plain = drawn(1, 1, 256, seed=7), drawn(1, 1, 128, seed=8)

    def run(mean: Callable[[Any], Any]) -> Any:
        heads = adapted(plain[0], given, q).view(1, 1, 4, 64)
        keys = adapted(plain[1], given, k).view(1, 1, 2, 64)
        found = turned(norm(heads, weight, mean)), turned(norm(keys, weight, mean)), norm(keys, weight.square(), mean)
        return [one.transpose(1, 2) for one in found]

    a, heads = as_alone(on_host, run)
    assert a.written == 2
    assert (heads.written, heads.blocks) == (3, (4 + 2 + 2, 1))


@pytest.mark.parametrize("why", ["registers", "held", "not constant", "words"])
def test_other_products_of_adapters_are_computed_by_blocks_of_their_own(on_host: kernels.Kernels, why: str) -> None:
    """Not by the one block of a row."""
    given, weight = drawn(1, 1, 1024), drawn(1024, seed=5)
    rank = {"registers": 64, "words": 3}.get(why, 4)
    pair = low_rank(1024, 1024, rank)
    if why == "not constant":
        pair = pair[0], pair[1].detach()

    def run(mean: Callable[[Any], Any]) -> Any:
        result = adapted(given, given, pair)
        normed = norm(result, weight, mean)
        return (result, normed) if why == "held" else (normed,)

    launched = as_alone(on_host, run)
    assert [name_of(kernel.text) for kernel in launched] == ["dense", "fused", "rows"]  # A, the sum, the norm
    assert ("ahead" in launched[1].text) == (why in ("registers", "held"))


def test_a_weight_that_is_deferred_is_computed_first(on_host: kernels.Kernels) -> None:
    given, weight = drawn(1, 8), drawn(16, 8, seed=1)

    def run(_mean: Callable[[Any], Any]) -> Any:
        return (torch.nn.functional.linear(given, weight * 2.0, weight[:, 0] * 3.0),)

    assert as_alone(on_host, run)


def test_two_kernels_side_by_side_do_what_each_does(on_host: kernels.Kernels) -> None:
    given, other = drawn(1, 320), drawn(1, 512, seed=1)
    weights = drawn(40, 320, seed=2), drawn(9, 512, seed=3)
    wanted = [dense.product(given, weights[0]), dense.product(other, weights[1])]
    apart, together = ([product.empty() for product in wanted] for _ in range(2))
    kernels_apart = [products.kernels_of(([one], [result]))[0] for one, result in zip(wanted, apart, strict=True)]
    (joint,) = products.kernels_of(*(([one], [result]) for one, result in zip(wanted, together, strict=True)))
    on_host.prepare([*(kernel.text for kernel in kernels_apart), joint.text], [])
    for kernel in (*kernels_apart, joint):
        on_host.launch(kernel)
    assert joint.blocks == (49, 1)
    assert all(torch.equal(one, other) for one, other in zip(apart, together, strict=True))
