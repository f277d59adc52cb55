"""F4: initializations that change the base weights say what that does to the model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._lab import tiny
from gemma4_compat.patches.adapters.peft_changed_base import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"nothing is said where pissa_niter_4 reloads"
    exact = False


def adapted(base: Any, init: Any) -> tuple[Any, list[str]]:
    """``base`` with an adapter, and what the shim warned of."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=init)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.get_peft_model(base, config).eval()
    return model, [str(item.message) for item in caught if item.category is Gemma4CompatWarning]


def logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(**tiny.inputs(next(model.parameters()).device)).logits.float()


@pytest.mark.parametrize("init", [True, "pissa", "olora", "orthogonal"])
def test_nothing_is_said_of_what_loads_as_it_was(workspace: Any, init: Any) -> None:
    assert adapted(workspace.load(), init)[1] == []


def test_the_remedy_it_names_gives_the_same_answers(workspace: Any, tmp_path: Path) -> None:
    import peft
    import torch

    base = workspace.load().float()  # the part that is taken out is rounded in bf16
    model, (text,) = adapted(base, "pissa_niter_4")
    assert "path_initial_model_for_weight_conversion" in text
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    outputs = logits(model)
    model.save_pretrained(tmp_path / "end", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", Gemma4CompatWarning)
        again = peft.PeftModel.from_pretrained(workspace.load().float(), tmp_path / "end")
    assert (logits(again) - logits(workspace.load().float())).abs().max() > 0.1
    assert (logits(again) - outputs).abs().max() < 1e-3


def test_loading_says_it_too(workspace: Any, tmp_path: Path) -> None:
    import peft

    model, said = adapted(workspace.load(), "pissa_niter_4")
    assert len(said) == 1
    model.save_pretrained(tmp_path)
    with pytest.warns(Gemma4CompatWarning, match=r"'pissa_niter_4' takes a random part out of the base") as told:
        again = peft.PeftModel.from_pretrained(workspace.load(), tmp_path)
    assert {one.filename for one in told if one.category is Gemma4CompatWarning} == {__file__}
    assert (logits(again) - logits(model)).abs().max() > 0


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_olora_counts_the_layers_it_quantized_again(workspace: Any, quantization: str) -> None:
    from gemma4_compat._gemma4.quantization.plain_layers import is_quantized

    base = workspace.load(quantization)
    count = sum(is_quantized(module) for name, module in base.named_modules() if "up_proj" in name)
    _, (text,) = adapted(base, "olora")
    assert f"took a part out of {count} quantized weights" in text


def test_other_models_are_left_alone() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1))
    assert adapted(model, "pissa_niter_4")[1] == []
