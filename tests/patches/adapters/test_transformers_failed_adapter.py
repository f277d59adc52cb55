"""``model.load_adapter`` that raises leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat.patches.adapters.transformers_failed_adapter import PATCH
from tests.patches.adapters.test_peft_failed_load import shape
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"\d+ modules of it stay in the model"


def test_a_second_adapter_that_fails_leaves_the_first(workspace: Any, tmp_path: Path) -> None:
    model = workspace.split()
    try:
        model.load_adapter(str(workspace.adapter("all")), "first")
    except (ImportError, ValueError) as error:
        pytest.skip(f"these releases of transformers and PEFT do not go together: {error}")
    before = shape(model)
    with pytest.raises(Gemma4CompatError, match=r"layers\.0\.mlp\.up_proj\.lora_A\.weight' \(\[4, 96\] saved"):
        model.load_adapter(str(workspace.mismatched_adapter()), "second")
    assert shape(model) == before
    assert list(model.peft_config) == ["first"]
    assert model.active_adapters() == ["first"]
