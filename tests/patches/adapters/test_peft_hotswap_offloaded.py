"""peft-hotswap-offloaded: adapters of a split model, prepared for hot swaps and swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.peft_hotswap_offloaded import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Tensor on device meta is not on the expected device|Tensor\.item\(\) cannot be called on meta tensors"


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
@pytest.mark.parametrize("offload", ["layers", "both"])
def test_a_swap_after_it(workspace: Any, tmp_path: Path, quantization: str | None, offload: str) -> None:
    from peft import PeftModel
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    other = tiny_adapters.write_adapter(
        workspace.load(), tiny_adapters.SOME_LINEARS, tmp_path / "other", rank=2, seed=9
    )
    first = tiny_adapters.write_adapter(workspace.load(), tiny_adapters.SOME_LINEARS, tmp_path / "first", rank=4)

    def answers(model: Any) -> list[Any]:
        tuned = PeftModel.from_pretrained(model, first).eval()
        prepare_model_for_compiled_hotswap(tuned, target_rank=4)
        found = [workspace.outputs(tuned)]
        hotswap_adapter(tuned, str(other), adapter_name="default", torch_device="cpu")
        return [*found, workspace.outputs(tuned)]

    expected, found = answers(workspace.load(quantization)), answers(workspace.split(quantization, offload))
    assert difference(*expected) > 0.01, "the swap changes nothing"
    assert [difference(*pair) for pair in zip(expected, found, strict=True)] == [0.0, 0.0]
