"""F9 for ``gemma4_unified`` (F30)."""

from __future__ import annotations

from gemma4_compat.patches.multimodal.transformers_quantized_audio_unified import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"mixed dtype|expected scalar type|features are off by"
    exact = False
