"""A model with offloaded modules refuses every move, whoever asks (tests/oracle/test_lifecycle.py has the parity)."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat.patches.offload.accelerate_move_offloaded import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"NotImplementedError: Cannot copy out of meta tensor"


@pytest.mark.parametrize("move", ["cpu", "to", "to_empty"])
def test_whatever_holds_the_model_cannot_move_it(workspace: Any, move: str) -> None:
    import torch

    class Holder(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

    holder = Holder(workspace.split())
    arguments = {} if move == "cpu" else {"device": "cpu"}
    with pytest.raises(Gemma4CompatError, match=r"You can't move a model .*'model\.\S+' the first"):
        getattr(holder, move)(**arguments)
    with pytest.raises(NotImplementedError):  # what upstream raises
        getattr(holder, move)(**arguments)


def test_the_guard_of_a_copy_is_its_own(workspace: Any) -> None:
    import torch

    model = workspace.split()
    copied = copy.deepcopy(model)
    copied.half()
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_guard_goes_when_nothing_is_offloaded_any_more(workspace: Any) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    model = workspace.split()
    assert "_apply" in vars(model)
    remove_hook_from_submodules(model)
    model.to("cpu")
    assert "_apply" not in vars(model)
    assert "_apply" not in vars(workspace.load())
