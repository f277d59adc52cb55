"""A load of an adapter that raises leaves no trace."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.adapters import rollback
from gemma4_compat._gemma4.models import walk
from gemma4_compat.patches.adapters.peft_failed_load import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"\d+ modules of it stay in the base model"


def shape(model: Any) -> tuple[Any, ...]:
    """Names and types of all modules, names and flags of all parameters, keys of what PEFT keeps on its layers."""
    return (
        [(name, type(module)) for name, module in model.named_modules()],
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        [
            {
                key: sorted(value)
                for key, value in vars(module).items()
                if isinstance(value, dict) and key != "_modules"
            }
            for module in model.modules()
            if "_active_adapter" in vars(module)
        ],
        [
            copy.copy(vars(module)["_active_adapter"])
            for module in model.modules()
            if "_active_adapter" in vars(module)
        ],
    )


@pytest.mark.parametrize("first", [None, "towers", "language"])
def test_a_file_that_cannot_be_read_leaves_the_model_as_it_was(
    workspace: Any, tmp_path: Path, first: str | None
) -> None:
    import shutil

    from peft import PeftModel
    from safetensors import SafetensorError

    adapter = Path(shutil.copytree(workspace.adapter("all"), tmp_path / "cut"))
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    model: Any = workspace.split()
    if first is not None:
        model = PeftModel.from_pretrained(model, workspace.adapter(first), is_trainable=True)
    before = shape(model)
    with pytest.raises(SafetensorError):  # upstream's own, as it came
        _ = PeftModel.from_pretrained(model, adapter) if first is None else model.load_adapter(str(adapter), "second")
    assert shape(model) == before
    assert "peft_config" not in vars(model)
    if first is not None:
        assert list(model.peft_config) == ["default"]


def test_what_succeeds_is_not_undone(workspace: Any) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with rollback.undone_if_it_fails(model, "default"):
        model[0] = torch.nn.Identity()
    assert isinstance(model[0], torch.nn.Identity)


def test_a_load_inside_a_load_of_the_same_adapter_is_undone_by_the_outer_one() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    first = model[0]

    def load_inside() -> None:
        with rollback.undone_if_it_fails(model, "default"):
            model[0] = torch.nn.Identity()
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"), rollback.undone_if_it_fails(model, "default"):
        load_inside()
    assert model[0] is first
    # Of another adapter, or when the outer one has ended, it is undone where it fails.
    with rollback.undone_if_it_fails(model, "other"):
        with pytest.raises(KeyError):
            load_inside()
        assert model[0] is first
    with pytest.raises(KeyError):
        load_inside()
    assert model[0] is first


def test_modules_are_walked_as_torch_walks_them(workspace: Any) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("all"))
    assert walk.named_modules(model) == list(model.named_modules())
    assert walk.modules(model) == list(model.modules())


def test_another_error_is_not_taken_for_a_mismatch() -> None:
    assert rollback.mismatch(RuntimeError("size mismatch, m1: [4 x 2]"), "folder", object()) is None
