"""What a GPU that is not NVIDIA's gets, as docs/SYSTEMS.md says, is what the code asks of a device."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.attention import unseen_keys
from gemma4_compat._graphs import fused_steps
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat._kernels.match import custom
from gemma4_compat._lab import workspace
from gemma4_compat._memory.blueprint import Blueprint
from gemma4_compat._offload.transfer.copy_stream import CopyStream
from gemma4_compat._plan import budgets, plan
from tests.helpers import ROOT, gpu

PAGE = ROOT / "docs" / "SYSTEMS.md"
COLUMNS = {"NVIDIA": "cuda", "AMD (ROCm)": "cuda", "Intel (XPU)": "xpu", "Apple (MPS)": "mps", "CPU": "cpu"}
#: Files that ask whether this package's kernels can be compiled -> what the page calls it.
ASKS_FOR_KERNELS = {
    "_generation/continuous.py": "texts that `serve` decodes together",
    "_generation/expert_slots.py": "experts that stay on the card",
    "_generation/sampling/best_words.py": "the head in 8 bits",
    "_generation/speculative/drafted_calls.py": "drafts",
    "_graphs/decoder.py": "fused steps",
    "_graphs/fused_steps.py": "fused steps",
    "_kernels/match/custom.py": "adapters and experts",
    "_kernels/match/dequantizing.py": "dequantize 4-bit weights",
    "_kernels/match/reading.py": "prompts' attention",
    "_kernels/match/shares.py": "of training's attention and loss",
    "_kernels/match/top_tokens.py": "top-k",
    "_training/chunks.py": "of training's attention and loss",
}


def prose() -> str:
    return re.sub(r"\s+", " ", PAGE.read_text(encoding="utf-8"))


def table() -> dict[str, dict[str, str]]:
    """The cells of the page, by row and column."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]
    first = next(number for number, row in enumerate(rows) if row[0] == "what")
    assert rows[first][1:] == list(COLUMNS)
    return {row[0]: dict(zip(rows[first][1:], row[1:], strict=True)) for row in rows[first + 2 :]}


@pytest.fixture(params=COLUMNS)
def column(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A column of the page, whose device is lent to PyTorch."""
    kind = COLUMNS[request.param]
    monkeypatch.setattr(torch.version, "cuda", "13.0" if request.param == "NVIDIA" else None)
    monkeypatch.setattr(torch.version, "hip", "7.1" if "AMD" in request.param else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(kind == "cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu(9, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: object())
    monkeypatch.setattr(torch.xpu, "is_available", lambda: kind == "xpu")
    monkeypatch.setattr(torch.xpu, "device_count", lambda: int(kind == "xpu"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")
    for owner in (torch.cuda, torch.xpu):
        monkeypatch.setattr(owner, "mem_get_info", lambda _: (10 << 30, 12 << 30))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10 << 30)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 0)
    return str(request.param)


def _copied(device: torch.device) -> str:
    return "in turn" if CopyStream(device)._stream is None else "while the GPU computes"


def _kernels(device: torch.device) -> str:
    reasons = [ask(device) for ask in (custom.unsupported_reason, fused_steps.unsupported_reason)]
    assert len({reason is None for reason in reasons}) == 1, reasons
    return "yes" if reasons[0] is None else "no: PyTorch"


def _memory(device: torch.device) -> str:
    found = budgets.machine()
    if not found:
        with pytest.raises(Gemma4CompatError, match="--vram"):
            budgets.of(None, None)
        return "see below"
    assert list(found) == [{"cuda": 0, "xpu": "xpu:0", "mps": "mps"}[device.type]]
    return "Metal's limit" if device.type == "mps" else "free memory"


def _fast(device: torch.device) -> str:
    given = budgets.machine() or {str(device): 1 << 30}
    model: Any = SimpleNamespace(quantization=None)
    blueprint: Blueprint = model
    return "no" if plan._slow_anywhere(blueprint, given) else "yes"


def _computes_on(_device: torch.device) -> str:
    main: Any = workspace.Workspace.main
    return "the CPU" if main.fget(None) == "cpu" else "the GPU"


ROWS: dict[str, Callable[[torch.device], str]] = {
    "streamed weights are copied": _copied,
    "decode_fast and train_fast replay graphs": lambda device: "yes" if device.type in RECORDERS else "no: eager",
    "this package's kernels compute": _kernels,
    "plan, serve and chat without --vram take": _memory,
    "a plan counts fast decoding": _fast,
    "doctor and check compute on": _computes_on,
}


@pytest.mark.parametrize("row", ROWS)
def test_the_table_is_what_the_code_asks(column: str, row: str) -> None:
    assert table()[row][column] == ROWS[row](torch.device(COLUMNS[column]))


def test_what_needs_cudas_compiler_is_named() -> None:
    package = ROOT / "gemma4_compat"
    asks = re.compile(r"custom\.unsupported_reason\(|\bCOMPILERS\b")
    files = (file for file in package.rglob("*.py") if asks.search(file.read_text(encoding="utf-8")))
    found = {file.relative_to(package).as_posix() for file in files}
    own = {"_kernels/kernels.py", *(file for file in found if file.startswith("_lab/"))}
    assert found - own == ASKS_FOR_KERNELS.keys()
    text = prose()
    assert [name for name in ASKS_FOR_KERNELS.values() if name not in text] == []


def test_patches_for_cuda_are_named() -> None:
    """With those that a device of ROCm gets."""
    patches = gemma4_compat.patches()
    first, second = sorted(patch.id for patch in patches if patch.detect is host.has_cuda)
    (third,) = (patch.id for patch in patches if any(one.dormant is unseen_keys.no_cuda for one in patch.targets))
    said = f"`{first}` and `{second}` act where PyTorch has a CUDA or ROCm device, `{third}` on CUDA only."
    assert said in prose()
