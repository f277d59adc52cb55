"""F10: the GPU's 8-bit kernel and inputs that are not contiguous; values are compared in tests/world/gpu."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat.patches.quantization.bitsandbytes_int8_strides import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a transposed input's outputs, of up to .* are off by up to"

    def expects_defect(self) -> bool:
        return is_affected(PATCH) and _cuda()


@pytest.mark.parametrize("name", ["int8_vectorwise_quant", "int8_double_quant"])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_the_kernel_gets_rows_that_lie_next_to_each_other(name: str, threshold: float) -> None:
    import torch

    got: list[Any] = []

    def kernel(A: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        got.append((A, args, kwargs))
        return "its outputs"

    replacement = {target.name: target.replacement for target in PATCH.targets}[name]
    assert replacement is not None
    columns, rows = torch.empty(64, 8, dtype=torch.float16).t(), torch.empty(8, 64, dtype=torch.float16)
    assert not columns.is_contiguous()
    assert replacement(kernel, columns, threshold=threshold) == "its outputs"
    assert replacement(kernel, rows, threshold) == "its outputs"
    assert [item[0].is_contiguous() for item in got] == [True, True]
    assert got[0][0].shape == (8, 64)
    assert got[1][0] is rows, "a copy where none is needed"
    assert [item[1:] for item in got] == [((), {"threshold": threshold}), ((threshold,), {})]


def test_hosts_without_a_gpu_are_left_alone() -> None:
    if _cuda():
        pytest.skip("this host has a CUDA device")
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    assert "not affected" in gemma4_compat.status()[PATCH.id].reason
