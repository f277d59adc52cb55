"""What every patch promises its user, as one test class: subclass it with the patch's id and the original error.

The defect is there without the patch (on releases that claim it), gone with it, and back when it is undone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import PatchState
from tests.conftest import is_affected, patch


class Promise:
    patch_id: str
    original: str  # regular expression for what the user sees without the patch
    exact: bool = True  # the reproduction compares logits, and they must be equal

    def expects_defect(self) -> bool:
        """Whether this host and these releases have the defect."""
        return is_affected(patch(self.patch_id))

    @pytest.mark.parametrize("shim", ["off", "reverted"])
    def test_without_the_patch_the_original_defect_is_there(
        self, reproduce: Callable[..., dict[str, Any]], shim: str
    ) -> None:
        result = reproduce(self.patch_id, shim=shim)
        assert result["defect"] == self.expects_defect(), result
        if self.expects_defect():
            assert re.search(self.original, result["detail"]), result["detail"]

    def test_with_the_patch_it_is_gone(self, reproduce: Callable[..., dict[str, Any]]) -> None:
        result = reproduce(self.patch_id, shim="on")
        assert not result["defect"], result
        if self.exact:
            assert result["parity"] == 0.0
        expected = {PatchState.APPLIED} if self.expects_defect() else {PatchState.NOT_NEEDED, PatchState.SKIPPED}
        assert result["state"] in expected, result["reason"]
