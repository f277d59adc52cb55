"""F3 and F13 through transformers' own adapter integration."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._reproduction import tiny_adapters
from gemma4_compat._reproduction.workspace import difference
from gemma4_compat.patches.adapters.transformers_adapter_placement import PATCH
from tests.patches.adapters.test_peft_keep_dispatch import lora_devices, placement
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"LoRA weights are on meta|Expected all tensors to be on the same device"


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_load_adapter_twice(workspace: Any, quantization: str | None) -> None:
    outputs = []
    for base in (workspace.load(quantization), workspace.split(quantization)):
        before = placement(base)
        for name in ("all", "towers"):
            base.load_adapter(str(workspace.adapter(name)), adapter_name=name)
            assert placement(base) == before
        assert lora_devices(base) == {"cpu" if workspace.main == "cpu" else "cuda"}
        for name in ("all", "towers"):
            base.set_adapter(name)
            outputs.append(workspace.outputs(base))
    assert difference(outputs[0], outputs[2]) == 0.0
    assert difference(outputs[1], outputs[3]) == 0.0
    assert difference(outputs[0], outputs[1]) > 0.0


def test_add_adapter_creates_it_where_the_layers_compute(workspace: Any) -> None:
    from peft import LoraConfig

    base = workspace.split()
    before = placement(base)
    base.add_adapter(LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["all"]))
    assert placement(base) == before
    assert lora_devices(base) == {"cpu" if workspace.main == "cpu" else "cuda"}


def test_a_load_that_fails_gives_the_map_back(workspace: Any, tmp_path: Any) -> None:
    base = workspace.split()
    before = placement(base)
    with pytest.raises((ValueError, OSError)):
        base.load_adapter(str(tmp_path))
    assert placement(base) == before
