"""Every kernel compiles for every architecture, by NVRTC and without a GPU, and fits there."""

from __future__ import annotations

import ast
import functools
import os
import re
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels import compiling, programs
from gemma4_compat._kernels.compiling import Nvrtc
from tests.helpers import ROOT
from tests.unit.kernels.kernel_examples import EXAMPLES, FROM, nvrtc_of_a_wheel

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
#: Architectures of the fast suite: from 9.0 on, kernels start early. 7.5 takes longest, for it has no bfloat16.
FAST = ((8, 0), (9, 0))
_REGISTERS = 1 << 16  # of an SM, on each of them
_SHARED = 48 << 10  # bytes that a block may have without asking for more
#: KiB of shared memory that a block may ask for.
_ASKED = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
#: Bytes that a module's kernels may spill, all on Blackwell (NVRTC 13.5): fp16 attention with heads of 512, products
#: of many rows, scores of wide fp16 heads, shares of many keys (also on Turing).
_SPILLED = {
    ("attention_tensor", (10, 0)): 36,
    ("nf4_gemv", (10, 0)): 144,
    ("nf4_gemv", (12, 0)): 144,
    ("shares", (7, 5)): 28,
    ("shares", (10, 0)): 88,
    ("head", (10, 0)): 68,
    ("head", (12, 0)): 216,
}
_FOUND = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


class Needs(NamedTuple):
    """What ptxas says a kernel needs: registers of a thread, bytes of a block, bytes of local memory of a thread."""

    registers: int
    shared: int
    stack: int
    spilled: int


def needs(log: str) -> dict[str, Needs]:
    """By the name of the kernel."""
    found = {}
    for name, stack, stores, loads, registers, rest in _FOUND.findall(log):
        shared = re.search(r"(\d+) bytes smem", rest)
        found[name] = Needs(int(registers), int(shared[1]) if shared else 0, int(stack), int(stores) + int(loads))
    return found


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = nvrtc_of_a_wheel()
    if found is None and os.environ.get("NVRTC") == "required":  # .ci/run
        pytest.fail("the extra `test` has brought no nvidia-cuda-nvrtc")
    return found or pytest.skip("needs NVRTC for Linux: pip install 'nvidia-cuda-nvrtc>=13'")


@functools.cache
def blocks_of(module: str, shared: int = 0) -> dict[str, int]:
    """The threads of a block, by the text of a module's kernels that ask for no more bytes of shared memory."""
    return {example.text: example.block for example in EXAMPLES[module]() if example.shared <= shared}


def test_code_for_a_virtual_architecture_is_ptx(nvrtc: Nvrtc) -> None:
    program = programs.program([next(iter(blocks_of("shifting")))])
    found, _, (name,) = nvrtc.compiled(*program, compiling.options("compute_80"))
    assert b".target sm_80" in found
    assert name.encode() in found
    assert found.endswith(b"\0")  # as the driver wants it


@pytest.mark.parametrize("module", EXAMPLES)
def test_a_kernel_waits_if_its_text_says_so(nvrtc: Nvrtc, module: str) -> None:
    text = next(iter(blocks_of(module, 1 << 20)))
    found, _, _ = nvrtc.compiled(*programs.program([text]), compiling.options("compute_90"))
    assert (b"griddepcontrol.wait" in found) == programs.waits(text)


@pytest.mark.parametrize("module", EXAMPLES)
@pytest.mark.parametrize(
    "capability",
    [pytest.param(one, marks=() if one in FAST else pytest.mark.full) for one in CAPABILITIES],
    ids=lambda one: f"{one[0]}.{one[1]}",
)
def test_kernels_compile_and_fit(nvrtc: Nvrtc, capability: tuple[int, int], module: str) -> None:
    architecture = f"sm_{capability[0]}{capability[1]}"
    if nvrtc.architecture(capability) != architecture:
        pytest.skip(f"NVRTC {nvrtc.version()} does not know {architecture}")
    if capability < FROM.get(module, capability):
        pytest.skip(f"PyTorch computes this before {FROM[module]}")
    blocks = blocks_of(module, _ASKED.get(capability, 0) << 10)
    options = [*compiling.options(architecture), "--ptxas-options=-v"]
    binary, log, names = nvrtc.compiled(*programs.program(list(blocks)), options)
    assert binary[:4] == b"\x7fELF"
    found = needs(log)
    assert sorted(found) == sorted(names)
    for name, block in zip(names, blocks.values()):
        one = found[name]
        assert one.stack <= one.spilled <= _SPILLED.get((module, capability), 0), (name, one)
        assert -(-one.registers // 8) * 8 * block <= _REGISTERS, (name, one, block)
        assert one.shared <= _SHARED, (name, one)


def test_what_does_not_fit_is_seen(nvrtc: Nvrtc) -> None:
    text = (
        'extern "C" __global__ void large(float* y, unsigned int n) {\n__shared__ float shared[1000];\n'
        "float kept[64];\nfor (int i = 0; i < 64; ++i) kept[i] = y[i * 32 + threadIdx.x];\n"
        "shared[threadIdx.x] = y[n];\n__syncthreads();\n"
        "for (int i = 0; i < 64; ++i) y[i] = kept[i] * kept[63 - i] + kept[(i + n) % 64] + shared[n];\n}\n"
    )
    options = ["--gpu-architecture=sm_90", "--ptxas-options=-v", "--maxrregcount=24"]
    _, log, (name,) = nvrtc.compiled(*programs.program([text]), options)
    one = needs(log)[name]
    assert one.registers <= 24
    assert one.shared == 4000
    assert one.stack >= 256
    assert one.spilled > 0


def test_every_kernel_has_examples() -> None:
    kernel = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")
    texts = {example.text for examples in EXAMPLES.values() for example in examples()}
    for name, text in programs.headers().items():
        found = kernel.findall(text)
        assert len(found) == text.count("__global__"), name
        including = "".join(one for one in texts if name in programs.INCLUDE.findall(one))
        assert [one for one in found if not re.search(rf"\b{one}<", including)] == [], name
    modules = (ROOT / "gemma4_compat" / "_kernels").rglob("*.py")
    writing = {file.stem for file in modules if "__global__ void" in file.read_text(encoding="utf-8")}
    assert writing == {"products", "writer"}  # kernels of several weights, and fused ones


def test_cuda_is_in_files() -> None:
    """Only what fuses operations writes CUDA C++, and what instantiates a template has up to three lines of it."""
    is_cuda = re.compile(r"threadIdx|blockIdx|__global__|__device__|__shared__|__syncthreads|#pragma unroll")
    for file in sorted((ROOT / "gemma4_compat").rglob("*.py")):
        if file.parent.name == "fuse":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
                text = "".join(part for part in parts if isinstance(part, str))
                assert not is_cuda.search(text) or len(text.splitlines()) <= 3, (file, node.lineno)


#: What no kernel of a step writes: weights, and the copy of the head, which is made before a capture.
CONSTANT = {"weight", "bytes", "scales", "sizes"}


def parameters(text: str) -> list[list[str]]:
    """Those of each kernel in a text."""
    found = re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?\w+\(([^)]*)\)", text)
    return [[" ".join(one.split()) for one in each.split(",")] for each in found]


def constants(kernel: list[str]) -> set[str]:
    """What the compiler takes for constant."""
    return {one.split()[-1] for one in kernel if one.startswith("const ") and "* __restrict__ " in one}


@pytest.mark.parametrize("name", EXAMPLES)
def test_only_what_no_kernel_writes_is_taken_for_constant(name: str) -> None:
    """It is read before the kernel in front has ended, or from a cache that does not see what that has written.

    On an H200 the fused head of two and of four rows gave other logits from replay to replay (2026-11-30).
    """
    looked_at = 0
    for kernel in EXAMPLES[name]():
        if not programs.waits(kernel.text):
            continue
        looked_at += 1
        for text in programs.included(kernel.text):
            assert {one for each in parameters(text) for one in constants(each)} <= CONSTANT
        for own in parameters(kernel.text):  # written here, not a template of a file
            if name in ("writer", "row_writer", "run_writer"):
                weights = {
                    one.split()[-1] for one, it in zip(own, kernel.tensors) if isinstance(it, torch.nn.Parameter)
                }
                assert constants(own) <= weights
            else:
                assert not [one for one in constants(own) if one.endswith("input")]
                assert any(one.endswith("input") for one in own)
    assert looked_at or name in ("flash", "expert_rows", "expert_slots", "nf4_dequantize", "top_tokens")  # never early
