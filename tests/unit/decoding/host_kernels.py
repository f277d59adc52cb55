"""Fused kernels on the CPU: the same CUDA C, compiled by the host's C++ compiler, a loop in place of threads."""

from __future__ import annotations

import ctypes
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gemma4_compat._decoding import kernel_source
from gemma4_compat._decoding.kernel_source import Kernel

#: What CUDA has and C++ has not. NVRTC gives no contraction across the functions that say how they round.
_CUDA = r"""
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define ON_HOST
static inline float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
static inline unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline float from_f16(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return (float)x; }
static inline unsigned short to_f16(float x) {
  _Float16 y = (_Float16)x; unsigned short bits; std::memcpy(&bits, &y, 2); return bits;
}
struct Index { unsigned int x; };
static thread_local Index blockIdx, blockDim, threadIdx;
"""

_numbers = itertools.count()
_launchers: dict[int, Callable[[list[Any], list[int]], None]] = {}

_library = torch.library.Library("gemma4_compat_tests", "DEF")
_library.define("launch(int number, int[] sizes, Tensor[] reads, Tensor(a!)[] writes) -> ()")


@torch.library.impl(_library, "launch", "CPU")  # type: ignore[untyped-decorator,unused-ignore]
def _launch(number: int, sizes: list[int], reads: list[Any], writes: list[Any]) -> None:
    _launchers[number]([*reads, *writes], sizes)


class HostCompiler:
    """In place of ``gemma4_compat._decoding.compiling.CudaCompiler``."""

    programs = 0

    def __init__(self, device: Any) -> None:
        """The kernels are for the host, whatever the device."""

    @staticmethod
    def obstacle() -> str | None:
        """A machine without a compiler."""
        return None if shutil.which("g++") else "there is no g++"

    def compiled(self, texts: Sequence[str]) -> list[Callable[[Kernel], None]]:
        """A shared library of the program."""
        text, names = kernel_source.program(texts)
        type(self).programs += 1
        drivers = [_driver(*found) for found in re.findall(r"__global__ void (\w+)\((.*?)\) \{", text)]
        flags = ["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / f"program{next(_numbers)}.cc"
            source.write_text(_CUDA + text + "".join(drivers))
            library = source.with_suffix(".so")
            command = ["g++", *flags, str(source), "-o", str(library)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            found = ctypes.CDLL(str(library))  # stays mapped
        return [_launcher(getattr(found, f"run_{name}")) for name in names]


def _driver(name: str, parameters: str) -> str:
    """A function that runs a kernel for every thread in turn."""
    types = [parameter.rpartition(" ")[0].replace("__restrict__", "") for parameter in parameters.split(", ")]
    arguments = ", ".join(f"({kind})(size_t)arguments[{number}]" for number, kind in enumerate(types))
    return (
        f'extern "C" void run_{name}(void** arguments, unsigned int threads) {{\n'
        f"blockDim.x = 1; for (unsigned int i = 0; i < threads; ++i) {{ blockIdx.x = i; {name}({arguments}); }}\n}}\n"
    )


def _launcher(function: Any) -> Callable[[Kernel], None]:
    number = next(_numbers)

    def run(tensors: list[Any], sizes: list[int]) -> None:
        arguments = [*(tensor.data_ptr() for tensor in tensors), *sizes]
        function((ctypes.c_void_p * len(arguments))(*arguments), ctypes.c_uint(sizes[0]))

    _launchers[number] = run

    def launch(kernel: Kernel) -> None:
        begin = len(kernel.tensors) - kernel.written
        reads, writes = list(kernel.tensors[:begin]), list(kernel.tensors[begin:])
        torch.ops.gemma4_compat_tests.launch(number, list(kernel.sizes), reads, writes)

    return launch
