"""What every patch promises its user, as one test class: subclass it with the patch's id and the original error.

The defect is there without the patch (on releases that claim it), gone with it, and back when it is undone. What each
reproduction found is a property of its test in a JUnit report; tools/matrix/measure.py reads it there.
"""

from __future__ import annotations

import json
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
        self, reproduce: Callable[..., dict[str, Any]], record_property: Callable[[str, str], None], shim: str
    ) -> None:
        result = reproduce(self.patch_id, shim=shim)
        record_property(f"reproduction {shim}", json.dumps(result))
        assert result["defect"] == (self.expects_defect() and result["applicable"]), result
        if result["defect"] and not re.search(self.original, result["detail"]):
            # On some releases another patch's defect comes first; with the other patches on, this one's is seen.
            alone = reproduce(self.patch_id, shim="others")
            record_property("reproduction others", json.dumps(alone))
            assert alone["defect"], alone
            assert re.search(self.original, alone["detail"]), (result["detail"], alone["detail"])

    def test_with_the_patch_it_is_gone(
        self, reproduce: Callable[..., dict[str, Any]], record_property: Callable[[str, str], None]
    ) -> None:
        result = reproduce(self.patch_id, shim="on")
        record_property("reproduction on", json.dumps(result))
        assert not result["defect"], result
        if self.exact and result["applicable"]:
            assert result["parity"] == 0.0
        expected = {PatchState.APPLIED} if self.expects_defect() else {PatchState.NOT_NEEDED, PatchState.SKIPPED}
        assert result["state"] in expected, result["reason"]
