"""F15: weights that transformers left on disk are not taken for each other."""

from __future__ import annotations

from gemma4_compat.patches.offload.accelerate_tied_on_disk import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"shapes cannot be multiplied|is invalid for input of size|logits differ|addresses of freed memory"
