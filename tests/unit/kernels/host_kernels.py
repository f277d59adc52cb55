"""Kernels on the CPU: the same CUDA C, compiled by the host's C++ compiler, fibers in place of threads."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import itertools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gemma4_compat._kernels import noted, programs
from gemma4_compat._kernels.programs import Kernel

#: ``cuda_on_host.h`` says what CUDA C has, C++ has not, and kernels here may use.
_HEADER = Path(__file__).with_name("cuda_on_host.h")

_numbers = itertools.count()
#: What is compiled stays for the process: tests ask for the same kernels again and again, and g++ takes a second.
_compiled: dict[tuple[str, Any], Callable[[Kernel], None]] = {}
_launchers: dict[int, Callable[[list[Any], list[int], list[int]], None]] = {}

_library = torch.library.Library("gemma4_compat_tests", "DEF")
_library.define("launch(int number, int[] sizes, int[] shape, Tensor[] reads, Tensor(a!)[] writes) -> ()")


@torch.library.impl(_library, "launch", "CPU")  # type: ignore[untyped-decorator,unused-ignore]
def _launch(number: int, sizes: list[int], shape: list[int], reads: list[Any], writes: list[Any]) -> None:
    _launchers[number]([*reads, *writes], sizes, shape)


class HostCompiler:
    """In place of ``gemma4_compat._kernels.compiling.CudaCompiler``."""

    def __init__(self, device: Any) -> None:
        """The kernels are for the host, whatever the device."""
        self.notes = noted.Notes()

    @staticmethod
    def unsupported_reason() -> str | None:
        """A machine without a compiler."""
        return None if shutil.which("g++") else "there is no g++"

    def begin(self, _texts: Sequence[str]) -> list[Any]:
        """Nothing: who asks for kernels waits for them."""
        return []

    def compiled(self, texts: Sequence[str]) -> list[Callable[[Kernel], None]]:
        """Of a shared library of the program, which has what no earlier one had."""
        files = tuple(programs.headers().items())
        if new := [text for text in dict.fromkeys(texts) if (text, files) not in _compiled]:
            _compiled.update(zip([(text, files) for text in new], self._library_of(new), strict=True))
        return [_compiled[text, files] for text in texts]

    @staticmethod
    def _library_of(texts: Sequence[str]) -> list[Callable[[Kernel], None]]:
        text, names = programs.program(texts)
        include = f'#include "{_HEADER.name}"\n'
        drivers = [_driver(number, name) for number, name in enumerate(names)]
        source = _folder() / f"program{os.getpid()}-{next(_numbers)}.cc"
        source.write_text("".join([include, text, include, *drivers]))
        library = source.with_suffix(".so")
        _compile([f"-I{_files()}", str(source), "-o", str(library)])
        found = ctypes.CDLL(str(library))  # stays mapped
        source.unlink()
        library.unlink()
        return [_launcher(getattr(found, f"run_{number}")) for number in range(len(names))]


@functools.cache
def _folder() -> Path:
    """Where this process compiles, with the header in g++'s own form: a program then takes half as long."""
    room, process = tempfile.mkdtemp(prefix="host-kernels-"), os.getpid()
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(room, ignore_errors=True))  # not by forks
    header = Path(shutil.copy(_HEADER, room))
    _compile(["-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return header.parent


def _files() -> Path:
    """What programs include, as it is now: tests change it."""
    headers = programs.headers()
    folder = _folder() / hashlib.sha256(repr(headers).encode()).hexdigest()
    if not folder.exists():
        folder.mkdir()
        for name, text in headers.items():
            (folder / name).write_text(text)
    return folder


def _compile(arguments: list[str]) -> None:
    options = [
        "-std=c++17",
        "-O1",
        "-U_FORTIFY_SOURCE",
        "-ffp-contract=off",
        "-march=native",
        "-fno-gnu-unique",
        "-shared",
        "-fPIC",
        "-w",
    ]
    command = ["g++", *options, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ cannot compile a kernel: {done.stderr}")


def _driver(number: int, name: str) -> str:
    """A function that runs a kernel; as in CUDA, each argument is the address of a value."""
    return (
        f"static void call_{number}() {{ emulated::call({name}); }}\n"
        f'extern "C" const char* run_{number}(void** arguments, unsigned x, unsigned y, unsigned block) {{\n'
        f"return emulated::run(call_{number}, arguments, x, y, block);\n}}\n"
    )


def _launcher(function: Any) -> Callable[[Kernel], None]:
    number = next(_numbers)
    function.restype = ctypes.c_char_p

    def run(tensors: list[Any], sizes: list[int], shape: list[int]) -> None:
        values: list[Any] = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        values += map(ctypes.c_uint32, sizes)
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        failure = function(addresses, *shape)
        if failure is not None:
            raise RuntimeError(failure.decode())

    _launchers[number] = run

    def launch(kernel: Kernel) -> None:
        begin = len(kernel.tensors) - kernel.written
        reads, writes = list(kernel.tensors[:begin]), list(kernel.tensors[begin:])
        sizes, shape = [_bits(size) for size in kernel.sizes], [*kernel.blocks, kernel.block]
        torch.ops.gemma4_compat_tests.launch(number, sizes, shape, reads, writes)

    return launch


class HostMemory:
    """In place of ``gemma4_compat._kernels.card_memory.CardMemory``: what was in it is gone when it is taken again."""

    size = 1 << 40  # bytes that there are

    def __init__(self, _device: Any, size: int) -> None:
        self._memory, self.is_there = torch.empty(size, dtype=torch.uint8), False

    def take(self) -> bool:
        """With other contents than before."""
        if not self.is_there and len(self._memory) <= self.size:
            self._memory.fill_(0xFF)
            self.is_there = True
        return self.is_there

    def give_back(self) -> None:
        """Have nobody read it."""
        self._memory.fill_(0xFF)
        self.is_there = False

    def tensor(self) -> Any:
        """Uint8."""
        return self._memory


def _bits(size: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f" if isinstance(size, float) else "<I", size))[0])
