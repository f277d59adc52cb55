"""The check that a test leaves torch as it was: it sees each change, names it, and puts it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gemma4_compat._graphs import recording  # noqa: E402
from gemma4_compat._lab.stand_ins.tape import Tape  # noqa: E402
from tests import torch_state  # noqa: E402

pytest_plugins = ["pytester"]

CHANGES: dict[str, Callable[[], Any]] = {
    "float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "deterministic, warnings only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "gradients": lambda: torch.set_grad_enabled(False),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "recorders of graphs": lambda: recording.RECORDERS.update(cpu=Tape),
}
if hasattr(torch.backends.mkldnn, "matmul"):

    def product() -> None:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"

    CHANGES["backends.mkldnn.matmul.fp32_precision"] = product


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_put_back(name: str) -> None:
    before = torch_state.now()
    CHANGES[name]()
    try:
        after = torch_state.now()
    finally:
        torch_state.put(before)
    assert f"{name}: {before[name]} became {after[name]}" in torch_state.changes(before, after)
    if name != "threads":
        assert torch_state.changes({}, after), "where the test was the first to import torch"
    assert torch_state.now() == before


def test_the_test_that_leaves_a_change_fails(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import _torch_is_left_as_it_was")
    pytester.makepyfile(
        """
        import torch
        def test_changes(): torch.set_float32_matmul_precision("medium")
        def test_comes_later(): assert torch.get_float32_matmul_precision() == "highest"
        """
    )
    ran = pytester.runpytest("-p", "no:cacheprovider")
    ran.assert_outcomes(passed=2, errors=1)
    ran.stdout.fnmatch_lines(["*ERROR at teardown of test_changes*", "*left torch's state changed*"])
    assert torch.get_float32_matmul_precision() == "highest"
