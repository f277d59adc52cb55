"""Assistant models (F30) in the releases that cannot call them."""

from __future__ import annotations

from gemma4_compat.patches.generation.transformers_assistant_arguments import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"SinglePositionMultiTokenCandidateGenerator\.__init__\(\) missing 2 required positional arguments"
    exact = False
