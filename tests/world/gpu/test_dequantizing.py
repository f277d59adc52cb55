"""4-bit weights dequantized by one kernel on a GPU: bitsandbytes' bits, on any stream, in threads, inside a graph."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any
from unittest import mock

import pytest
from packaging.version import Version

import gemma4_compat
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.compiling import CudaCompiler
from gemma4_compat._kernels.match import dequantizing
from gemma4_compat._kernels.specs.expert_rows import BLOCKSIZES, Format
from gemma4_compat._kernels.specs.nf4_dequantize import computed
from gemma4_compat._lab import tiny

PATCH = "bitsandbytes-fused-dequantization"
#: Outputs, inputs: whole blocks of threads and not, a row shorter than a block of values.
SHAPES = ((512, 1536), (66, 1000), (2816, 2112), (24, 32))


@pytest.fixture(autouse=True, scope="module")
def compiles() -> None:
    pytest.importorskip("bitsandbytes")
    if (reason := CudaCompiler.unsupported_reason()) is not None:
        pytest.skip(reason)


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Inside, bitsandbytes dequantizes."""
    with mock.patch.dict(kernels.COMPILERS, clear=True):
        yield


def quantized(shape: tuple[int, int], *, nested: bool = True, dtype: Any = None, **more: Any) -> tuple[Any, Any]:
    import torch
    from bitsandbytes import functional

    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to("cuda", dtype or torch.bfloat16)
    found: tuple[Any, Any] = functional.quantize_4bit(values, compress_statistics=nested, **more)
    return found


def expected(packed: Any, state: Any) -> Any:
    nested = state.state2.blocksize if state.nested else 0
    scales = (state.absmax, state.state2.absmax, state.state2.code, state.offset) if nested else (state.absmax,)
    layout = Format(state.quant_type, state.blocksize, nested, state.dtype)
    return computed(packed, state.shape, layout, scales)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_every_format_has_bitsandbytes_bits(quant_type: str) -> None:
    import torch

    smallest = 32 if Version(metadata.version("bitsandbytes")) >= Version("0.49.2") else 64  # that it knows
    sizes = [size for size in sorted(BLOCKSIZES) if size >= smallest]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for blocksize, nested, dtype in itertools.product(sizes, (False, True), dtypes):
        packed, state = quantized((66, 1536), nested=nested, dtype=dtype, quant_type=quant_type, blocksize=blocksize)
        found = dequantizing.of_state(packed, state)
        assert found is not None, (blocksize, nested, dtype)
        assert torch.equal(found, expected(packed, state)), (blocksize, nested, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("nested", [False, True])
def test_shapes(shape: tuple[int, int], nested: bool) -> None:
    import torch
    from bitsandbytes import functional

    packed, state = quantized(shape, nested=nested, quant_type="nf4")
    wanted = expected(packed, state)
    assert torch.equal(functional.dequantize_4bit(packed, state), wanted)
    assert torch.equal(functional.dequantize_4bit(packed.t(), state), wanted.t())


@pytest.mark.parametrize("rows", [5, 70, 2000])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products_and_their_gradients(rows: int, nested: bool, bias: bool) -> None:
    import torch
    from bitsandbytes.nn import Linear4bit

    torch.manual_seed(0)
    more = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "compress_statistics": nested}
    layer = Linear4bit(1536, 2048, bias=bias, **more).to("cuda")

    def both() -> tuple[Any, Any]:
        given = torch.ones(1, rows, 1536, dtype=torch.bfloat16, device="cuda").cumsum(1).div(rows).requires_grad_()
        output = layer(given)
        output.square().sum().backward()
        with torch.no_grad():
            assert torch.equal(layer(given), output)
        return output, given.grad

    with without():
        wanted = both()
    for one, other in zip(both(), wanted, strict=True):
        assert torch.equal(one, other)


def test_the_products_of_bitsandbytes_go_through_the_patch() -> None:
    if not hasattr(sys.modules["bitsandbytes.backends.cuda.ops"], "_dequant_linear_fallback"):
        pytest.skip("bitsandbytes before 0.50 calls dequantize_4bit")
    import torch
    from bitsandbytes.nn import Linear4bit

    assert gemma4_compat.status()[PATCH].reason_code == gemma4_compat.Reason.AFFECTED
    layer = Linear4bit(1536, 2048, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cuda")
    with mock.patch.object(dequantizing, "weight", wraps=dequantizing.weight) as asked, torch.no_grad():
        layer(torch.ones(1, 2000, 1536, dtype=torch.bfloat16, device="cuda"))
    assert asked.call_count == 1


def test_a_stream_and_threads() -> None:
    """Results are written on the stream of the caller, each into memory of its own."""
    import torch

    packed, state = quantized((2048, 1536))
    wanted = expected(packed, state)
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                found = dequantizing.of_state(packed, state)
                if not torch.equal(found, wanted):
                    wrong.append(number)
                found.zero_()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_inside_a_graph() -> None:
    """A format that was tried is captured; one that was not is bitsandbytes' own there, and is tried afterwards."""
    import torch

    packed, state = quantized((512, 1536))
    wanted = expected(packed, state)
    for tried in (False, True):
        kernels.of(packed.device).tests.passed.clear()
        dequantizing._launches.clear()
        if tried:
            assert dequantizing.of_state(packed, state) is not None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = dequantizing.of_state(packed, state)
            assert (found is not None) == tried
            kept = expected(packed, state) if found is None else found
        kept.zero_()
        graph.replay()
        assert torch.equal(kept, wanted)


def test_a_model_reads_a_prompt_with_the_same_bits_in_no_more_memory(workspace: Any) -> None:
    import torch

    model = workspace.load("4bit-double")
    inputs = tiny.inputs(workspace.main, text_only=True)

    def logits() -> tuple[Any, int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            found = model(**inputs).logits
        torch.cuda.synchronize()
        return found, torch.cuda.max_memory_allocated() - before

    with without():
        logits()
        wanted, peak = logits()
    logits()
    found, now = logits()
    assert torch.equal(found, wanted)
    assert now <= peak
