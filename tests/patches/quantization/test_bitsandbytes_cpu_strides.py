"""F10, F18: the CPU's fused 4-bit kernel and inputs that are not contiguous."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._engine.changes import upstream
from gemma4_compat.patches.quantization.bitsandbytes_cpu_strides import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise


def _host_has_the_kernel() -> bool:
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    return is_affected(PATCH) and bool(functional.has_avx512bf16())


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a transposed input's outputs, of up to .* are off by up to"

    def expects_defect(self) -> bool:
        return _host_has_the_kernel()


def test_a_call_of_the_kernel_takes_no_more_calls_than_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the input costs less than the detour that is left out."""
    import torch

    if not _host_has_the_kernel():
        pytest.skip("this CPU has no AVX512-BF16 (or this bitsandbytes does not use it): the kernel does not run")
    nn, functional = pytest.importorskip("bitsandbytes.nn"), pytest.importorskip("bitsandbytes.functional")
    layer = nn.Linear4bit(64, 96, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu").eval()
    x = torch.randn(1, 1, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x)

        def run() -> Any:
            return functional.gemv_4bit(x, layer.weight, state=layer.weight.quant_state)

        def calls() -> int:
            count = 0

            def look(_frame: Any, event: str, _argument: Any) -> None:
                nonlocal count
                count += event in ("call", "c_call")

            run()
            sys.setprofile(look)
            try:
                run()
            finally:
                sys.setprofile(None)
            return count

        with_it = calls()
        assert torch.equal(run() + layer.bias, expected)
        monkeypatch.setattr(functional, "gemv_4bit", upstream(functional.gemv_4bit))
        assert with_it <= calls()
        assert torch.equal(run() + layer.bias, expected)


@pytest.mark.parametrize("nested", [False, True], ids=["4bit", "4bit-double"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x.transpose(1, 2)[:, ::2],
        lambda x: x.repeat(1, 2, 1)[:, ::2].transpose(1, 2),
        lambda x: x.repeat(2, 1, 1).transpose(1, 2),
        lambda x: x.transpose(1, 2)[0, 0],
        lambda x: x.transpose(1, 2)[:, :0],
        lambda x: x[0].t().float(),
    ],
    ids=["transposed", "rows left out", "columns left out", "batch", "vector", "empty", "float32"],
)
def test_a_view_and_its_copy_have_equal_outputs(nested: bool, change: Callable[[Any], Any]) -> None:
    import torch

    if not _host_has_the_kernel():
        pytest.skip(
            "this CPU has no AVX512-BF16 (or this bitsandbytes does not use it): another kernel, not bit-exact"
        )
    modules = pytest.importorskip("bitsandbytes.nn", reason="needs bitsandbytes")
    torch.manual_seed(0)
    layer = modules.Linear4bit(64, 96, compute_dtype=torch.bfloat16, quant_type="nf4", compress_statistics=nested).to(
        "cpu"
    )
    view = change(torch.randn(1, 64, 8, dtype=torch.bfloat16))
    with torch.no_grad():
        assert torch.equal(layer.eval()(view), layer(view.contiguous()))
