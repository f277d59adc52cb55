"""What is asked of a GPU: a compute capability is NVIDIA's, and PyTorch gives AMD's numbers under the same name."""

from __future__ import annotations

import re

import pytest
import torch

from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.attention import unseen_keys
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.specs import flash
from tests.helpers import ROOT, gpu

GPU = torch.device("cuda", 0)


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose numbers are at least those of a Hopper, as those of AMD's gfx90a, gfx942 and gfx1100 are."""
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: gpu(9, 0, shared_memory_per_block_optin=232_448)
    )


@pytest.mark.usefixtures("newest")
def test_of_nvidias() -> None:
    assert host.capability(GPU) == (9, 0)
    assert (unseen_keys.takes_cudnn(GPU), flash.shared_memory(GPU)) == (True, 232_448)


@pytest.mark.usefixtures("newest")
def test_amds_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert host.capability(GPU) is None
    assert (unseen_keys.takes_cudnn(GPU), flash.shared_memory(GPU)) == (False, 0)
    assert custom.unsupported_reason(GPU) == "kernels need CUDA"


@pytest.mark.parametrize("kind", ["cpu", "xpu", "mps", "meta"])
def test_nor_have_others(kind: str) -> None:
    assert host.capability(torch.device(kind)) is None
    assert not unseen_keys.takes_cudnn(torch.device(kind))


def test_it_is_asked_in_one_place() -> None:
    asks = re.compile(r"get_device_capability|\.major\b|\.minor\b|gcnArchName")
    package = ROOT / "gemma4_compat"
    found = [file for file in package.rglob("*.py") if asks.search(file.read_text(encoding="utf-8"))]
    assert found == [package / "_gemma4" / "host.py"]
