"""Kernels on the CPU: the same CUDA C, compiled by the host's C++ compiler, fibers in place of threads."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gemma4_compat._kernels.specs import kernel_source
from gemma4_compat._kernels.specs.kernel_source import Kernel

#: ``cuda_on_host.h`` says what CUDA C has, C++ has not, and kernels here may use.
_HEADER = Path(__file__).with_name("cuda_on_host.h")
_KERNEL = re.compile(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\)\s*\{")

_numbers = itertools.count()
#: What is compiled stays for the process: tests ask for the same kernels again and again, and g++ takes a second.
_compiled: dict[str, Callable[[Kernel], None]] = {}
_launchers: dict[int, Callable[[list[Any], list[float], list[int]], None]] = {}

_library = torch.library.Library("gemma4_compat_tests", "DEF")
_library.define("launch(int number, float[] sizes, int[] shape, Tensor[] reads, Tensor(a!)[] writes) -> ()")


@torch.library.impl(_library, "launch", "CPU")  # type: ignore[untyped-decorator,unused-ignore]
def _launch(number: int, sizes: list[float], shape: list[int], reads: list[Any], writes: list[Any]) -> None:
    _launchers[number]([*reads, *writes], sizes, shape)


class HostCompiler:
    """In place of ``gemma4_compat._kernels.compiling.CudaCompiler``."""

    def __init__(self, device: Any) -> None:
        """The kernels are for the host, whatever the device."""

    @staticmethod
    def unsupported_reason() -> str | None:
        """A machine without a compiler."""
        return None if shutil.which("g++") else "there is no g++"

    def begin(self, _texts: Sequence[str]) -> list[Any]:
        """Nothing: who asks for kernels waits for them."""
        return []

    def compiled(self, texts: Sequence[str]) -> list[Callable[[Kernel], None]]:
        """Of a shared library of the program, which has what no earlier one had."""
        if new := [text for text in dict.fromkeys(texts) if text not in _compiled]:
            _compiled.update(zip(new, self._library_of(new), strict=True))
        return [_compiled[text] for text in texts]

    @staticmethod
    def _library_of(texts: Sequence[str]) -> list[Callable[[Kernel], None]]:
        text, names = kernel_source.program(texts)
        types = {name: _types(parameters) for name, parameters in _KERNEL.findall(text)}
        include = f'#include "{_HEADER.name}"\n'
        drivers = [_driver(name, types[name]) for name in names]
        source = _folder() / f"program{os.getpid()}-{next(_numbers)}.cc"
        source.write_text("".join([include, text, include, *drivers]))
        library = source.with_suffix(".so")
        _compile([str(source), "-o", str(library)])
        found = ctypes.CDLL(str(library))  # stays mapped
        source.unlink()
        library.unlink()
        return [_launcher(getattr(found, f"run_{name}"), types[name]) for name in names]


@functools.cache
def _folder() -> Path:
    """Where this process compiles, with the header in g++'s own form: a program then takes half as long."""
    room, process = tempfile.mkdtemp(prefix="host-kernels-"), os.getpid()
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(room, ignore_errors=True))  # not by forks
    header = Path(shutil.copy(_HEADER, room))
    _compile(["-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return header.parent


def _compile(arguments: list[str]) -> None:
    command = ["g++", "-O1", "-ffp-contract=off", "-march=native", "-shared", "-fPIC", "-w", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ cannot compile a kernel: {done.stderr}")


def _types(parameters: str) -> list[str]:
    return [parameter.replace("__restrict__", "").rpartition(" ")[0].strip() for parameter in parameters.split(",")]


def _driver(name: str, types: list[str]) -> str:
    """A function that runs a kernel; as in CUDA, each argument is the address of a value."""
    arguments = ", ".join(f"*({kind}*)emulated::arguments[{number}]" for number, kind in enumerate(types))
    return (
        f"static void call_{name}() {{ {name}({arguments}); }}\n"
        f'extern "C" const char* run_{name}(void** arguments, unsigned int x, unsigned int y, unsigned int block) {{\n'
        f"return emulated::run(call_{name}, arguments, x, y, block);\n}}\n"
    )


def _launcher(function: Any, types: list[str]) -> Callable[[Kernel], None]:
    number = next(_numbers)
    function.restype = ctypes.c_char_p

    def run(tensors: list[Any], sizes: list[float], shape: list[int]) -> None:
        values: list[Any] = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        for kind, size in zip(types[len(tensors) :], sizes, strict=True):
            values.append(ctypes.c_float(size) if kind == "float" else ctypes.c_uint32(int(size)))
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        failure = function(addresses, *shape)
        if failure is not None:
            raise RuntimeError(failure.decode())

    _launchers[number] = run

    def launch(kernel: Kernel) -> None:
        begin = len(kernel.tensors) - kernel.written
        reads, writes = list(kernel.tensors[:begin]), list(kernel.tensors[begin:])
        sizes, shape = [float(size) for size in kernel.sizes], [*kernel.blocks, kernel.block]
        torch.ops.gemma4_compat_tests.launch(number, sizes, shape, reads, writes)

    return launch
