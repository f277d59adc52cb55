"""F5 for ``gemma4_unified`` (F30)."""

from __future__ import annotations

from gemma4_compat.patches.placement.transformers_shared_kv_unified import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"KeyError: 'sliding_attention'"

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return is_affected(PATCH)
