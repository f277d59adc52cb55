"""F5: ``dispatch_model`` without ``skip_keys`` leaves the container of shared keys and values alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.placement.accelerate_skip_keys import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"KeyError: "


@pytest.mark.parametrize("wrapped", ["PeftModel", "a module of the user's"])
def test_it_finds_the_models_list_in_a_wrapper(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, wrapped: str
) -> None:
    import torch
    from accelerate import dispatch_model
    from peft import PeftModel

    class Wrapper(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

    base = workspace.load()
    placement = tiny.device_map(base, "both", main=workspace.main, offloaded=workspace.offloaded)
    if wrapped == "PeftModel":
        whole, prefix = PeftModel.from_pretrained(base, workspace.adapter("all")), "base_model.model."
        answering: Any = whole
    else:
        whole, prefix = Wrapper(base), "inner."
        answering = base
    dispatch_model(whole, {f"{prefix}{name}": device for name, device in placement.items()}, offload_dir=tmp_path)
    reference = one_device(None, "all" if wrapped == "PeftModel" else None)
    assert difference(reference, workspace.outputs(answering)) == 0.0


def test_keys_the_caller_names_are_taken_as_they_are(workspace: Any, tmp_path: Path) -> None:
    from accelerate import dispatch_model

    for given, expected in ((None, workspace.load()._skip_keys_device_placement), (["mine"], ["mine"])):
        model = workspace.load()
        placement = tiny.device_map(model, "towers", main=workspace.main, offloaded=workspace.offloaded)
        dispatch_model(model, placement, offload_dir=tmp_path / str(given), skip_keys=given)
        assert set(model._hf_hook.skip_keys or []) == set(expected if PATCH_APPLIES or given else [])


def test_a_wrong_argument_is_pythons_own_error(workspace: Any) -> None:
    from accelerate import dispatch_model

    with pytest.raises(TypeError, match="nonsense"):
        dispatch_model(workspace.load(), {"": "cpu"}, nonsense=1)


def _applies() -> bool:
    from tests.conftest import is_affected

    return is_affected(PATCH)


PATCH_APPLIES = _applies()
