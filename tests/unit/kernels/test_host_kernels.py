"""Blocks of threads on the CPU meet at barriers and in shuffles as on a GPU, and say where they do not."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels.programs import Kernel
from tests.unit.kernels.host_kernels import HostCompiler

pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)

_SUM = """extern "C" __global__ void __launch_bounds__(96) total(const float* __restrict__ x, float* __restrict__ sums,
  unsigned int n, float scale) {
  __shared__ float part[3];
  const unsigned int thread = threadIdx.x, row = blockIdx.y * gridDim.x + blockIdx.x;
  float sum = 0.0f;
  for (unsigned int i = thread; i < n; i += blockDim.x) sum += x[row * n + i];
  #pragma unroll
  for (int by = 16; by > 0; by >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  if (thread % 32u == 0u) part[thread / 32u] = sum;
  __syncthreads();
  if (thread == 0u) sums[row] = (part[0] + part[1] + part[2]) * scale;
}
"""


def run(*kernels: Kernel) -> None:
    for kernel, launch in zip(kernels, HostCompiler(None).compiled([one.text for one in kernels]), strict=True):
        launch(kernel)


def one_block(body: str, *, block: int = 64) -> list[int]:
    """What each thread of a block writes to ``out[threadIdx.x]``; -1 where it wrote nothing."""
    text = (
        'extern "C" __global__ void probe(int* __restrict__ out, unsigned int n) {\n'
        f"int t = threadIdx.x;\n{body}\n}}\n"
    )
    out = torch.full((block,), -1, dtype=torch.int32)
    run(Kernel(text, (out,), 1, (block,), block=block, grid=(1, 1)))
    return list(out.tolist())


def test_a_grid_of_sums() -> None:
    x, sums = torch.arange(6 * 200.0).reshape(6, 200), torch.zeros(6)
    kernel = Kernel(_SUM, (x, sums), 1, (200, 0.5), block=96, grid=(2, 3))
    run(kernel, kernel)  # two kernels, the second also with its blocks the other way round
    assert torch.equal(sums, x.sum(1) / 2)


def test_shuffles() -> None:
    assert one_block("out[t] = __shfl_sync(0xffffffffu, t, 3, 8);", block=32) == [
        lane // 8 * 8 + 3 for lane in range(32)
    ]
    assert one_block("out[t] = __shfl_up_sync(0xffffffffu, t, 2u, 16);", block=32) == [
        lane - 2 if lane % 16 >= 2 else lane for lane in range(32)
    ]
    assert one_block("out[t] = __shfl_down_sync(0xffffffffu, t, 2u);", block=64) == [
        lane + 2 if lane % 32 < 30 else lane for lane in range(64)
    ]
    assert one_block("out[t] = (int)__ballot_sync(0xffffffffu, t % 3 == 0 && t < 8);", block=32) == [0b1001001] * 32
    assert one_block("if (t < 2) out[t] = __shfl_xor_sync(3u, t, 1);", block=32)[:3] == [1, 0, -1]


def test_threads_that_ended_are_not_waited_for() -> None:
    found = one_block(
        "if (t >= 40) return; __shared__ int x; if (t == 0) x = 7; __syncthreads(); __syncwarp(); out[t] = x;"
    )
    assert found == [7] * 40 + [-1] * 24


def test_words() -> None:
    assert one_block("out[t] = (int)__byte_perm(0x33221100u, 0x77665544u, 0x7250u);", block=1) == [0x77225500]
    assert one_block("out[t] = (int)multiply_pairs_bf16(pair_bf16(1.5f, -2.0f), pair_bf16(3.0f, 0.5f));", block=1) == [
        torch.tensor([4.5, -1.0]).bfloat16().view(torch.int32).item()
    ]
    assert one_block("out[t] = (int)multiply_pairs_f16(pair_f16(1.5f, -2.0f), pair_f16(3.0f, 0.5f));", block=1) == [
        torch.tensor([4.5, -1.0]).half().view(torch.int32).item()
    ]
    assert one_block(
        "out[t] = add_flushed(1e-39f, 0.0f) == 0.0f && fma_flushed(1e-20f, 1e-20f, 0.0f) == 0.0f;", block=1
    ) == [1]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("if (t < 8) __syncwarp(255u); else __syncthreads(); if (t < 8) __syncwarp(1023u);", "a deadlock"),
        ("if (t < 32) __syncthreads(); else if (t < 40) __syncwarp(); else __shfl_sync(~0u, t, 0);", "a deadlock"),
        ("if (t == 1) __syncwarp(1u);", "a lane that its own mask does not name"),
        ("if (t == 5) load_once((const char*)out + 8);", "a misaligned address (block 0, 0, thread 5)"),
        ("__shfl_sync(0xffffffffu, t, 0, 12);", "a width that is no power of two"),
    ],
)  # fmt: skip
def test_what_would_hang_or_fault_is_said(body: str, what: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(what)):
        one_block(body)
    assert one_block("__syncthreads(); out[t] = t;") == list(range(64))  # the next block is not concerned


def test_shared_memory_that_nobody_wrote_is_not_a_number() -> None:
    assert one_block("__shared__ float x[64]; if (t < 8) x[t] = 1.0f; __syncthreads(); out[t] = x[t] != x[t];") == [
        int(thread >= 8) for thread in range(64)
    ]


def test_a_missing_barrier_shows() -> None:
    body = "__shared__ int x[64]; x[t] = t; out[t] = x[63 - t];"
    assert one_block(body) != [63 - thread for thread in range(64)]
