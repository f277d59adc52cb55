"""What is read on the host are the values at the time of the copy."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._engine.runtime.host_copy import HostCopy


def test_later_writes_are_not_seen() -> None:
    tensor = torch.arange(3)
    copy = HostCopy(tensor)
    tensor.zero_()
    assert copy.tolist() == [0, 1, 2]
