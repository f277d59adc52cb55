"""Code for older GPUs, run on this one: PTX for compute capability 7.5 and 8.0, which the driver translates."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    import torch

    from benchmarks.decoding import own_kernels

    return own_kernels.older(torch.device("cuda", torch.cuda.current_device()), few=True)


@pytest.mark.parametrize("capability", ["7.5", "8.0"])
def test_what_has_pytorchs_bits_has_them_there(found: dict[str, Any], capability: str) -> None:
    for name, of in found[capability]["trials"].items():
        assert (of["differ"], of["errors"]) == ([], {}), name


@pytest.mark.parametrize("capability", ["7.5", "8.0"])
def test_custom_kernels_err_no_more_there(found: dict[str, Any], capability: str) -> None:
    from benchmarks.decoding import own_kernels

    assert own_kernels.wrong(found[capability]["errors"]) == []


def test_code_for_8_0_has_the_bits_of_this_gpus(found: dict[str, Any]) -> None:
    """Tensor cores of 7.5 add up fewer products at once, so its bits may be others."""
    assert found["8.0"]["others"] == []
    assert found["8.0"]["compared"] > 0
