"""F35 for ``gemma4_unified`` (F30)."""

from __future__ import annotations

from gemma4_compat.patches.training.transformers_rotary_order_unified import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a second rank of DDP: logits differ by"
