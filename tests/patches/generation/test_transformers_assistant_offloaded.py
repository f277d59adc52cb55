"""An assistant that is offloaded as a whole (F30)."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat.patches.generation.transformers_assistant_offloaded import PATCH, forward
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"NotImplementedError: Cannot copy out of meta tensor"
    exact = False


@pytest.mark.skipif(not is_affected(PATCH), reason="this release has no assistants of Gemma 4")
def test_its_drafts_are_those_of_the_same_assistant_in_memory(workspace: Any) -> None:
    """Sampled, so that other drafts would give another text."""
    import torch

    try:
        assistants = [workspace.load_assistant(offloaded=offloaded) for offloaded in (False, True)]
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    model, batch = workspace.load(), workspace.inputs(text_only=True)
    texts = []
    for assistant in assistants:
        torch.manual_seed(0)
        texts.append(model.generate(**batch, assistant_model=assistant, do_sample=True, max_new_tokens=10).cpu())
    assert torch.equal(*texts)
    assert assistants[1].pre_projection.weight.device.type == "meta"


def test_the_head_is_there_where_its_weight_is_read_directly(workspace: Any) -> None:
    """As in released assistants, whose logits are those of some clusters of tokens."""
    import torch
    from accelerate import disk_offload

    model = torch.nn.Module()
    model.pre_projection, model.lm_head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    expected = model.lm_head.weight.detach().clone()
    disk_offload(model, workspace.folder / "assistant-head", execution_device="cpu")
    for ordered in (True, False):
        model.masked_embedding = torch.nn.Identity() if ordered else None
        found = forward(lambda self: (self.pre_projection.weight.device, self.lm_head.weight), model)
        assert found[0].type == "cpu"
        assert found[1].equal(expected) if ordered else found[1].device.type == "meta"
    assert model.pre_projection.weight.device.type == "meta"
