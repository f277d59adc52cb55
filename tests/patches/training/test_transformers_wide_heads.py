"""F59: no attention over wide heads is left to torch's math kernel."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from gemma4_compat.patches.training.transformers_wide_heads import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"2 of 2 layers with heads of 512 leave grouped heads to sdpa"
    exact = False


#: Of the largest logit and of the gradients' norm.
BOUND = 1e-5


def test_outputs_and_gradients_are_those_without_it(workspace: Any) -> None:
    import torch

    found = []
    for undone in (False, True):
        if undone:
            gemma4_compat.revert(PATCH.id)
        try:
            model = tiny.load(workspace.larger(full_width=512), device=workspace.main, dtype=torch.float32)
            ids = workspace.inputs(text_only=True)["input_ids"]
            output = model(input_ids=ids, labels=ids)
            output.loss.backward()
            weights = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
            found.append((output.logits.detach(), torch.cat(weights)))
        finally:
            gemma4_compat.install()
    (logits, gradients), (usual, expected) = found
    assert (logits - usual).abs().max() <= BOUND * usual.abs().max()
    assert (gradients - expected).norm() <= BOUND * expected.norm()


@pytest.mark.skipif(not is_affected(PATCH), reason="transformers 5.13 does it itself")
@pytest.mark.parametrize(("width", "grouped"), [(64, True), (256, True), (264, False), (512, False)])
def test_narrow_heads_are_left_alone(workspace: Any, width: int, grouped: bool) -> None:
    import torch

    workspace.load()
    upstream = sys.modules["transformers.integrations.sdpa_attention"]
    key = torch.zeros(1, 1, 4, width)
    assert upstream.use_gqa_in_sdpa(None, key) is grouped
    assert upstream.use_gqa_in_sdpa(torch.ones(1, 1, 4, 4, dtype=torch.bool), key) is False
