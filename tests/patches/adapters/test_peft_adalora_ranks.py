"""F4: AdaLoRA's number of ranks is no trained weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat.patches.adapters.peft_adalora_ranks import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"AdaLoRA after one step, saved and loaded again: logits differ by"


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_the_number_of_ranks_is_frozen_and_the_weights_are_not(
    workspace: Any, quantization: str | None, autocast: bool
) -> None:
    import peft

    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["up_proj"])
    model = peft.get_peft_model(workspace.load(quantization), config, autocast_adapter_dtype=autocast)
    trained = {name.split(".")[-2] for name, value in model.named_parameters() if value.requires_grad}
    assert trained == {"lora_A", "lora_B", "lora_E"}
    assert {float(value) for name, value in model.named_parameters() if ".ranknum.default" in name} == {4.0}


@pytest.mark.parametrize("kind", ["AdaLoraConfig", "IA3Config"])
def test_what_is_loaded_to_be_used_is_frozen(workspace: Any, tmp_path: Path, kind: str) -> None:
    import peft

    options = {"total_step": 10} if kind == "AdaLoraConfig" else {"feedforward_modules": ["up_proj"]}
    config = getattr(peft, kind)(target_modules=["up_proj"], **options)
    peft.get_peft_model(workspace.load(), config).save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(workspace.load(), tmp_path)
    assert not [name for name, value in model.named_parameters() if value.requires_grad]
