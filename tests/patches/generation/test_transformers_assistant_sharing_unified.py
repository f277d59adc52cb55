"""Assistant models of ``gemma4_unified`` (F30)."""

from __future__ import annotations

from gemma4_compat.patches.generation.transformers_assistant_sharing_unified import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"set of layer types producing a cache|KeyError: 'full_attention'"
    exact = False
