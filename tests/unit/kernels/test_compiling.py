"""Kernels are compiled once: by the threads of one process, for every later process."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels import compiling, kernel_files, launching
from gemma4_compat._kernels.compiling import CudaCompiler, Nvrtc
from gemma4_compat._kernels.programs import Kernel

DEVICE = torch.device("cuda", 0)


def text(number: int, length: int = 0) -> str:
    return f'extern "C" __global__ void fused(float* y) {{ y[{number}] = 0; {"/" * length} }}\n'


class NvrtcLibrary:
    """In place of libnvrtc: a "binary" is the program's text and its options."""

    def __init__(self, version: tuple[int, int] = (13, 0), architectures: tuple[int, ...] = (75, 80, 90, 100)) -> None:
        self.release, self.architectures = version, architectures
        self.programs: dict[int, dict[str, Any]] = {}
        self.threads: set[int] = set()
        self._lock = threading.Lock()

    @property
    def nvrtcGetErrorString(self) -> Any:  # noqa: N802 (NVRTC's names)
        return _Error()

    def nvrtcVersion(self, major: Any, minor: Any) -> int:  # noqa: N802
        major._obj.value, minor._obj.value = self.release
        return 0

    def nvrtcGetNumSupportedArchs(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.architectures)
        return 0

    def nvrtcGetSupportedArchs(self, known: Any) -> int:  # noqa: N802
        known[:] = self.architectures
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, *_: Any) -> int:  # noqa: N802
        with self._lock:
            program._obj.value = len(self.programs) + 1
            self.programs[program._obj.value] = {"source": source.decode(), "alive": True}
            self.threads.add(threading.get_ident())
        return 0

    def nvrtcAddNameExpression(self, program: Any, name: bytes) -> int:  # noqa: N802
        return 0 if self.programs[program.value]["alive"] else 3

    def nvrtcGetLoweredName(self, _program: Any, name: bytes, found: Any) -> int:  # noqa: N802
        found._obj.value = name
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        self.programs[program.value]["options"] = [options[number].decode() for number in range(count)]
        return 6 if "mistake" in self.programs[program.value]["source"] else 0

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        self.programs[program._obj.value]["alive"] = False
        return 0

    def __getattr__(self, name: str) -> Any:
        what = name.removeprefix("nvrtcGet").removesuffix("Size")
        if what not in ("ProgramLog", "CUBIN"):
            raise AttributeError(name)

        def get(program: Any, found: Any) -> int:
            one = self.programs[program.value]
            data = b"line 3: a mistake\0" if what == "ProgramLog" else repr((one["source"], one["options"])).encode()
            if name.endswith("Size"):
                found._obj.value = len(data)
            else:
                ctypes.memmove(found, data, len(data))
            return 0

        return get


class _Error:
    """A function whose ``restype`` can be set, as one of ctypes."""

    def __call__(self, result: int) -> bytes:
        return {6: b"NVRTC_ERROR_COMPILATION"}[result]


class DriverLibrary:
    """In place of libcuda: a module is the number of a binary, a function that of a name."""

    def __init__(self) -> None:
        self.binaries: list[str] = []
        self.functions: list[tuple[int, str]] = []
        self.launched: list[tuple[int, str]] = []
        self.refuses = False

    def cuDriverGetVersion(self, found: Any) -> int:  # noqa: N802 (CUDA's names)
        found._obj.value = 13000
        return 0

    def cuGetErrorName(self, result: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_NO_BINARY_FOR_GPU"
        return 0

    def cuModuleLoadData(self, module: Any, binary: bytes) -> int:  # noqa: N802
        self.binaries.append(binary.decode())
        module._obj.value = len(self.binaries)
        return 209 if self.refuses else 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        assert f" {name.decode()}(" in self.binaries[module.value - 1]
        self.functions.append((module.value, name.decode()))
        function._obj.value = len(self.functions)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, *_: Any) -> int:  # noqa: N802
        self.launched.append(self.functions[function.value - 1])
        return 0


class Process:
    """What a process has: its compiler, NVRTC and driver."""

    def __init__(self, **given: Any) -> None:
        self.capability = given.pop("capability", (9, 0))
        self.nvrtc, self.driver = NvrtcLibrary(**given), DriverLibrary()
        self.compiler = CudaCompiler(DEVICE)
        self.compiler.__dict__ |= {
            "_nvrtc": Nvrtc(self.nvrtc),
            "_driver": launching.Driver(self.driver),
            "_capability": self.capability,
        }

    def launched(self, texts: list[str]) -> list[str]:
        """The source that each launcher's kernel was in, after its name."""
        for launch in self.compiler.compiled(texts):
            launch(Kernel("", (), 0, (1,)))
        return [self.driver.binaries[module - 1].partition(f" {name}(")[2] for module, name in self.driver.launched]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cuda = SimpleNamespace(
        device=lambda _device: contextlib.nullcontext(),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(compiling, "_cores", lambda: 2)
    monkeypatch.setenv(kernel_files.VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


TEXTS = [text(number, length) for number, length in enumerate((4000, 10, 3900, 200, 30))]


def test_each_text_has_its_kernel() -> None:
    process = Process()
    for number, source in enumerate(process.launched(TEXTS)):
        assert source.startswith(f"float* y) {{ y[{number}] = 0;")
    assert len(process.nvrtc.programs) == len(process.driver.binaries) == 2
    assert not any(program["alive"] for program in process.nvrtc.programs.values())
    assert {program["options"][0] for program in process.nvrtc.programs.values()} == {"--gpu-architecture=sm_90"}


def test_a_second_process_compiles_nothing() -> None:
    Process().launched(TEXTS)
    second = Process()
    for number, source in enumerate(second.launched(TEXTS[::-1])):
        assert source.startswith(f"float* y) {{ y[{len(TEXTS) - 1 - number}] = 0;")
    assert second.nvrtc.programs == {}
    third = Process()
    third.launched([*TEXTS[2:], text(9)])
    assert len(third.nvrtc.programs) == 1
    third.launched(TEXTS)
    assert len(third.nvrtc.programs) == 1


def test_kernels_are_compiled_in_the_background() -> None:
    process = Process()
    (begun,) = process.compiler.begin(TEXTS[1:3])
    assert process.compiler.begin(TEXTS[2:3]) == [begun]
    others = process.compiler.begin(TEXTS)
    assert begun in others
    assert len(others) == 2
    for future in others:
        future.result(10)
    assert threading.get_ident() not in process.nvrtc.threads
    count = len(process.nvrtc.programs)
    for number, source in enumerate(process.launched(TEXTS)):
        assert source.startswith(f"float* y) {{ y[{number}] = 0;")
    assert process.compiler.begin(TEXTS) == []
    assert len(process.nvrtc.programs) == count
    second = Process()  # it finds them on disk, also if the first one never asked for them again
    assert second.compiler.begin(TEXTS) == []
    second.launched(TEXTS)
    assert second.nvrtc.programs == {}


def test_who_cannot_wait_longer_waits_for_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    process, may_go_on = Process(), threading.Event()
    compile_program = NvrtcLibrary.nvrtcCompileProgram

    def slowly(*args: Any) -> int:
        may_go_on.wait(10)
        return compile_program(*args)

    monkeypatch.setattr(NvrtcLibrary, "nvrtcCompileProgram", slowly)
    (future,) = process.compiler.begin(TEXTS)
    assert not future.done()
    threading.Timer(0.05, may_go_on.set).start()
    assert len(process.launched(TEXTS)) == len(TEXTS)
    assert len(process.nvrtc.programs) == 2


def test_a_mistake_in_the_background_is_told_to_who_asks_then() -> None:
    process, wrong = Process(), text(5).replace("= 0", "= mistake")
    for _ in range(2):  # the second time it is compiled anew
        (future,) = process.compiler.begin([*TEXTS, wrong])
        with pytest.raises(RuntimeError, match="a mistake"):
            future.result(10)
        with pytest.raises(RuntimeError, match="a mistake"):
            process.compiler.compiled([*TEXTS, wrong])
    process.launched(TEXTS)


@pytest.mark.parametrize(
    "other",
    [{"capability": (10, 0)}, {"version": (13, 1)}],
    ids=["another GPU", "another NVRTC"],
)
def test_what_a_binary_depends_on(other: dict[str, Any]) -> None:
    Process().launched(TEXTS)
    process = Process(**other)
    process.launched(TEXTS)
    assert len(process.nvrtc.programs) == 2


def test_a_broken_file_is_compiled_anew(folder: Path) -> None:
    Process().launched(TEXTS)
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-5])
    for expected in (2, 0):
        process = Process()
        process.launched(TEXTS)
        assert len(process.nvrtc.programs) == expected


def test_nothing_is_kept_if_the_user_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_files.VARIABLE, "off")
    for _ in range(2):
        process = Process()
        process.launched(TEXTS)
        assert len(process.nvrtc.programs) == 2
    assert not folder.exists()


def test_a_mistake_has_its_log_and_is_not_kept(folder: Path) -> None:
    process = Process()
    with pytest.raises(RuntimeError, match=r"^NVRTC_ERROR_COMPILATION\nline 3: a mistake$"):
        process.compiler.compiled([*TEXTS, text(5).replace("= 0", "= mistake")])
    assert not any(program["alive"] for program in process.nvrtc.programs.values())
    assert not folder.exists()


def test_a_log_begins_with_what_went_wrong() -> None:
    log = "a.cu(3): warning #177-D: unused\n  int i;\na.cu(9): error: no such name\n1 error detected"
    found = compiling._errors_first(log).splitlines()
    assert found == [
        *("a.cu(9): error: no such name", "1 error detected", "a.cu(3): warning #177-D: unused", "  int i;")
    ]
    assert compiling._errors_first("line 3: a mistake") == "line 3: a mistake"


def test_a_binary_that_the_driver_refuses_is_not_kept(folder: Path) -> None:
    process = Process()
    process.driver.refuses = True
    with pytest.raises(RuntimeError, match="loading kernels: CUDA_ERROR_NO_BINARY_FOR_GPU"):
        process.compiler.compiled(TEXTS)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 3), "sm_100"), ((7, 5), "sm_75")]
)
def test_the_nearest_architecture(capability: tuple[int, int], expected: str) -> None:
    assert Nvrtc(NvrtcLibrary()).architecture(capability) == expected


@pytest.mark.parametrize("capability", [(7, 0), (12, 0)])
def test_a_gpu_that_nvrtc_does_not_know(capability: tuple[int, int]) -> None:
    expected = f"NVRTC 13.0 cannot compile for compute capability {capability[0]}.{capability[1]}"
    with pytest.raises(RuntimeError, match=expected):
        Process(capability=capability).compiler.compiled(TEXTS)


def test_parts_are_about_equal() -> None:
    texts = [text(number, 100 * (number % 7)) for number in range(100)]
    parts = compiling.shared_out(texts, 4)
    assert sorted(one for part in parts for one in part) == sorted(texts)
    lengths = [sum(map(len, part)) for part in parts]
    assert len(parts) == 4
    assert max(lengths) - min(lengths) < 700
    assert compiling.shared_out(texts[:2], 64) == [sorted(texts[:2], key=len, reverse=True)]
    assert len(compiling.shared_out(texts, 1)) == 1
