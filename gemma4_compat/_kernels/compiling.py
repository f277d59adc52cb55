"""CUDA C compiled for one GPU by NVRTC, which PyTorch ships, in several threads, or read from disk."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gemma4_compat._engine.io import terminal
from gemma4_compat._gemma4 import host
from gemma4_compat._kernels import kernel_files, launching, noted, programs
from gemma4_compat._kernels.kernel_files import Compiled
from gemma4_compat._kernels.programs import Kernel

#: Characters of kernels that are worth a thread: NVRTC takes 20 ms for any program, and 4 ms for a kernel of 700.
_WORTH = 4000
#: Beyond, threads gave little: 94 kernels took 2.3 s in one, 0.69 s in 4, 0.57 s in 8 and 0.50 s in 16 (NVRTC 13.0).
_MOST_THREADS = 8


class Nvrtc:
    """The functions of NVRTC that this package calls. Threads may call them at the same time.

    Args:
        library: ``libnvrtc``, from ctypes.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def version(self) -> tuple[int, int]:
        """Such as ``(13, 0)``."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def architecture(self, capability: tuple[int, int]) -> str:
        """The architecture to compile for: that of the GPU, or the nearest one before it whose kernels it runs.

        Args:
            capability: the GPU's compute capability.

        Raises:
            RuntimeError: this NVRTC knows none.
        """
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        known = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(known))
        major, minor = capability
        fitting = [one for one in known if one // 10 == major and one % 10 <= minor]
        if not fitting:
            release = ".".join(map(str, self.version()))
            raise RuntimeError(f"NVRTC {release} cannot compile for compute capability {major}.{minor}")
        return f"sm_{max(fitting)}"

    def compiled(self, text: str, names: Sequence[str], options: Sequence[str]) -> tuple[bytes, str, list[str]]:
        """The binary of a program, NVRTC's log, and the names of its kernels in the binary.

        Args:
            text: CUDA C++, which may include what :func:`programs.headers` has.
            names: of kernels, or instances of templates.
            options: with ``--gpu-architecture=sm_…``; with ``compute_…``, a virtual architecture, the result is PTX,
                which the driver translates.

        Raises:
            RuntimeError: it cannot be compiled; the message has the log, its errors first.
        """
        program = ctypes.c_void_p()
        headers = programs.headers()
        files = len(headers), _strings(headers.values()), _strings(headers)
        create = self._library.nvrtcCreateProgram
        self._check(create(ctypes.byref(program), text.encode(), b"gemma4_compat.cu", *files))
        try:
            for name in names:
                self._check(self._library.nvrtcAddNameExpression(program, name.encode()))
            result = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            self._check(result, _errors_first(log))
            virtual = any("=compute_" in option for option in options)
            binary = self._bytes("PTX" if virtual else "CUBIN", program)
            return binary, log, [self._name(program, name) for name in names]
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _name(self, program: Any, name: str) -> str:
        found = ctypes.c_char_p()
        self._check(self._library.nvrtcGetLoweredName(program, name.encode(), ctypes.byref(found)))
        assert found.value is not None  # or it failed
        return found.value.decode()

    def _bytes(self, what: str, program: Any) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        found = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, found))
        return found.raw

    def _check(self, result: int, log: str = "") -> None:
        if result:
            name = self._library.nvrtcGetErrorString
            name.restype = ctypes.c_char_p
            raise RuntimeError(f"{(name(result) or b'NVRTC failed').decode()}\n{log}".rstrip())


def _strings(texts: Iterable[str]) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _errors_first(log: str) -> str:
    """A log of NVRTC, where dozens of warnings may stand before what went wrong."""
    lines = log.splitlines()
    first = next((number for number, line in enumerate(lines) if "error" in line), 0)
    return "\n".join((*lines[first:], *lines[:first]))


def options(architecture: str) -> tuple[str, ...]:
    """What NVRTC is told, beyond its defaults: bits depend on it.

    Not ``--no-cache``: NVRTC 13.0 took 47 ms for a new program of one product, and 66 ms with it.
    """
    return (f"--gpu-architecture={architecture}",)


class CudaCompiler:
    """Compiles what is not on disk, and keeps it there (:mod:`kernel_files`).

    Needs torch 2.9 or newer, whose private functions find NVRTC and the driver.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._loaded: dict[str, tuple[Any, str]] = {}  # by what stands for a text: module, name of the kernel
        self._begun: dict[str, Future[list[Compiled]]] = {}  # likewise: in the background, not loaded yet
        self._lock = threading.Lock()

    @staticmethod
    def unsupported_reason() -> str | None:
        """Rules out releases without these functions, and AMD's GPUs, whose operations differ bitwise."""
        import torch

        if torch.version.cuda is None:
            return "kernels need CUDA"
        try:
            from torch.cuda import _utils
        except ImportError:
            _utils = None
        absent = [name for name in ("_get_nvrtc_library", "_get_cuda_library") if not hasattr(_utils, name)]
        return f"torch {torch.__version__} lacks torch.cuda._utils.{absent[0]}" if absent else None

    def compiled(self, texts: Sequence[str]) -> list[Callable[[Kernel], None]]:
        """For each text, a function that launches its kernel: from disk, or compiled now. Not inside a capture.

        Raises:
            RuntimeError: NVRTC or the driver cannot.
        """
        import torch

        by_identity = {kernel_files.identity(text): text for text in texts}
        with torch.cuda.device(self._device), self._lock:
            for future in {id(one): one for key, one in self._begun.items() if key in by_identity}.values():
                self._begun = {key: one for key, one in self._begun.items() if one is not future}
                self._load(future.result())
            self._load(self._files.read(by_identity.keys() - self._loaded.keys()))
            new = [text for key, text in by_identity.items() if key not in self._loaded]
            if new:
                with terminal.explained("compiling CUDA kernels, which are kept on disk"):
                    fresh = compiled(self._nvrtc, new, self._options)
                self._load(fresh)
                self._keep(fresh)
            return [self._launcher(key, text) for key, text in by_identity.items()]

    def begin(self, texts: Sequence[str]) -> list[Future[Any]]:
        """Compile what is not on disk in the background.

        Returns:
            what has to end before :meth:`compiled` need not wait for NVRTC: nothing if all is on disk.
        """
        import torch

        by_identity = {kernel_files.identity(text): text for text in texts}
        with torch.cuda.device(self._device), self._lock:
            self._load(self._files.read(by_identity.keys() - self._loaded.keys() - self._begun.keys()))
            new = by_identity.keys() - self._loaded.keys() - self._begun.keys()
            if new:
                texts, nvrtc, given = [by_identity[key] for key in sorted(new)], self._nvrtc, self._options
                pool = ThreadPoolExecutor(1, thread_name_prefix="gemma4_compat-nvrtc")
                future = pool.submit(lambda: self._keep(compiled(nvrtc, texts, given)))
                pool.shutdown(wait=False)  # it ends by itself; the interpreter waits for that
                self._begun |= dict.fromkeys(new, future)
            return list({id(one): one for key, one in self._begun.items() if key in by_identity}.values())

    def _keep(self, fresh: list[Compiled]) -> list[Compiled]:
        for one in fresh:
            self._files.add(one)
        return fresh

    def _load(self, several: Sequence[Compiled]) -> None:
        for one in several:
            module = self._driver.load(one.binary)
            self._loaded |= {key: (module, name) for key, name in one.names.items()}

    def _launcher(self, key: str, text: str) -> Callable[[Kernel], None]:
        module, name = self._loaded[key]
        early = launching.may_start_early(text, self._capability, self._driver)
        return self._driver.launcher(self._driver.function(module, name), name, self._device, early=early)

    @functools.cached_property
    def _capability(self) -> tuple[int, int]:
        found = host.capability(self._device)
        assert found is not None  # :meth:`unsupported_reason` has seen to it
        return found

    @functools.cached_property
    def _nvrtc(self) -> Nvrtc:
        from torch.cuda import _utils

        return Nvrtc(_utils._get_nvrtc_library())

    @functools.cached_property
    def _driver(self) -> launching.Driver:
        return launching.driver()

    @functools.cached_property
    def _options(self) -> tuple[str, ...]:
        return options(self._nvrtc.architecture(self._capability))

    @functools.cached_property
    def _key(self) -> str:
        return repr((self._nvrtc.version(), self._options, programs.headers()))

    @functools.cached_property
    def _files(self) -> kernel_files.Files:
        return kernel_files.Files(kernel_files.folder(), self._key)

    @functools.cached_property
    def notes(self) -> noted.Notes:
        """On steps that were fused on this kind of GPU."""
        import torch

        gpu = torch.cuda.get_device_properties(self._device)
        key = repr((self._key, noted.environment(), gpu.name, gpu.multi_processor_count, self._driver.version()))
        return noted.Notes(kernel_files.Files(kernel_files.folder(), key))


def compiled(nvrtc: Nvrtc, texts: Sequence[str], given: Sequence[str]) -> list[Compiled]:
    """Kernels with these texts, compiled in up to eight threads.

    Args:
        nvrtc: the compiler.
        texts: no text twice.
        given: options.

    Raises:
        RuntimeError: one cannot be compiled.
    """

    def compile_part(part: Sequence[str]) -> Compiled:
        binary, _, names = nvrtc.compiled(*programs.program(part), given)
        return Compiled(binary, dict(zip(map(kernel_files.identity, part), names)))

    parts = shared_out(texts, _cores())
    if len(parts) == 1:
        return [compile_part(parts[0])]
    with ThreadPoolExecutor(len(parts), thread_name_prefix="gemma4_compat-nvrtc") as pool:
        return list(pool.map(compile_part, parts))


def shared_out(texts: Sequence[str], cores: int) -> list[list[str]]:
    """Parts of about the same length, each worth a thread: the longest text goes first, to the shortest part."""
    count = max(1, min(cores, sum(map(programs.length, texts)) // _WORTH, len(texts)))
    parts: list[list[str]] = [[] for _ in range(count)]
    lengths = [0] * count
    for text in sorted(texts, key=programs.length, reverse=True):
        shortest = lengths.index(min(lengths))
        parts[shortest].append(text)
        lengths[shortest] += programs.length(text)
    return parts


def _cores() -> int:
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, _MOST_THREADS)
