from __future__ import annotations

from collections.abc import Iterator

import pytest

from gemma4_compat._kernels import kernels


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[kernels.Kernels]:
    """The kernels of the CPU, which an emulator runs."""
    import torch

    from tests.unit.kernels.host_kernels import HostCompiler

    reason = HostCompiler.obstacle()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    device = torch.device("cpu")
    yield kernels.Kernels(device)
    kernels._kernels.pop(device, None)
