"""What each tuner of PEFT does on Gemma 4's clipped and other linears, on plain and on quantized bases.

The table of docs/ADAPTERS.md says what :data:`TUNERS` says.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import _tiny
from gemma4_compat._repro import difference
from gemma4_compat.patches.peft_clippable_linear import is_wrapper

TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj", "ffw_layer_1"]

#: Tuner: its config's class and fields, and since which PEFT it runs on a 4-bit base and merges into one ("": never).
TUNERS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "LoRA": ("LoraConfig", {"r": 4}, "0", "0"),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True}, "0", "0"),
    "rsLoRA": ("LoraConfig", {"r": 4, "use_rslora": True}, "0", "0"),
    "PiSSA": ("LoraConfig", {"r": 4, "init_lora_weights": "pissa"}, "", ""),
    "OLoRA": ("LoraConfig", {"r": 4, "init_lora_weights": "olora"}, "0", "0"),
    "orthogonal": ("LoraConfig", {"r": 4, "init_lora_weights": "orthogonal"}, "", ""),
    "LoHa": ("LoHaConfig", {"r": 4}, "", ""),
    "LoKr": ("LoKrConfig", {"r": 4}, "", ""),
    "IA3": ("IA3Config", {"feedforward_modules": ["down_proj"]}, "0", ""),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}, "0", ""),
    "VeRA": ("VeraConfig", {"r": 4}, "0", "0.20"),
    "RandLoRA": ("RandLoraConfig", {"r": 8}, "0", ""),
    "RoAd": ("RoadConfig", {"group_size": 32}, "0", "0"),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 32}, "0", "0.21"),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}, "0.20", "0.20"),
    "HRA": ("HRAConfig", {"r": 4}, "", ""),
}


def since(release: str) -> bool:
    import peft

    from gemma4_compat import _versions

    return release != "" and _versions.admits(f">={release}", peft.__version__)


def config(tuner: str) -> Any:
    import peft

    kind, fields, _, _ = TUNERS[tuner]
    return getattr(peft, kind)(target_modules=TARGETS, **fields)


def trained(model: Any, device: Any) -> Any:
    """``model`` after two steps of training on text, image and sound; every adapter weight that was used has moved."""
    import torch

    weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
    before = {name: value.detach().clone() for name, value in weights.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    used = set()
    model.train()
    batch = _tiny.inputs(device)
    for _ in range(2):  # some weights have no gradient while another one is zero
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        used |= {name for name, value in weights.items() if value.grad is not None and value.grad.any()}
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
    moved = {name for name, value in weights.items() if not torch.equal(value, before[name])}
    assert len(moved) > 0.75 * len(used) > 0  # AdaLoRA's first steps are below a bit of some
    for tower in ("vision_tower", "audio_tower"):
        assert [name for name in moved if tower in name], tower
    return model.eval()


@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_tuner_learns_saves_and_merges_or_says_why_not(
    workspace: Any, tmp_path: Path, tuner: str, quantization: str | None
) -> None:
    import peft

    _, _, runs, merges = TUNERS[tuner]
    base = workspace.load(quantization)
    if quantization is not None and not since(runs):
        plain = workspace.answers(base)
        with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"do not work on quantized layers .*Use LoRA"):
            peft.get_peft_model(base, config(tuner))
        assert difference(plain, workspace.answers(base)) == 0.0
        return
    model = trained(peft.get_peft_model(base, config(tuner)), workspace.main)
    assert not [
        name for name, module in model.named_modules() if is_wrapper(module) and hasattr(module, "get_base_layer")
    ]
    answers = workspace.answers(model)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(workspace.load(quantization), tmp_path)
    assert difference(answers, workspace.answers(again.eval())) == 0.0
    if quantization is None:
        merged = workspace.answers(model.merge_and_unload()).logits[0]
        # One rounding of each weight to bf16, through 8 random layers: measured 0.4 to 1.8 where logits span 30.
        assert (merged - answers.logits[0]).abs().max() < 3
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gemma4_compat.Gemma4CompatWarning)
        if since(merges):
            model.merge_and_unload()
        else:
            with pytest.raises((gemma4_compat.Gemma4CompatError, ValueError), match=r"[Cc]annot merge"):
                model.merge_and_unload()
            assert difference(answers, workspace.answers(model)) == 0.0
