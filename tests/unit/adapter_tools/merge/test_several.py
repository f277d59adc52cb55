"""Several adapters with weights: their changes are multiplied and added, as PEFT does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from tests.unit.adapter_tools.merge.adapters import LANGUAGE, assert_same, make, tensors


def two(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """LoRAs of other ranks, scales and modules, some of them the same; the second is on the embedding as well."""
    from peft import LoraConfig

    configs = {
        "one": LoraConfig(r=4, lora_alpha=8, target_modules=LANGUAGE),
        "other": LoraConfig(
            r=2, lora_alpha=3, use_rslora=True, target_modules=r".*language_model.*(q_proj|embed_tokens_per_layer)"
        ),
    }
    return {name: make(checkpoint, folder / name, config, scale=0.1) for name, config in configs.items()}


@pytest.mark.full
def test_the_sum_is_that_of_peft(workspace: Any, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import Gemma4ForConditionalGeneration

    folders = two(workspace.checkpoint, tmp_path)
    weights = {folders["one"]: 0.7, folders["other"]: -0.5}
    report = gemma4_compat.merge_adapter(workspace.checkpoint, weights, tmp_path / "out", check=1)
    assert report.ok
    assert report.adapters == {str(folder): weight for folder, weight in weights.items()}

    def loaded() -> Any:
        plain = Gemma4ForConditionalGeneration.from_pretrained(workspace.checkpoint, dtype=torch.float32)
        model = PeftModel.from_pretrained(plain, folders["one"], adapter_name="one")
        model.load_adapter(folders["other"], adapter_name="other")
        return model

    model = loaded()
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("one", 0.7)
            module.set_scale("other", -0.5)
    wanted = model.merge_and_unload(safe_merge=True, adapter_names=["one", "other"]).state_dict()
    found = tensors(tmp_path / "out")
    assert_same(found, {name: value.to(torch.bfloat16) for name, value in wanted.items()})

    # What PEFT calls "cat" is the same sum, with one product for both, so in another order of additions.
    gemma4_compat.merge_adapter(workspace.checkpoint, weights, tmp_path / "fp32", check=0, dtype="float32")
    model = loaded()
    model.add_weighted_adapter(["one", "other"], [0.7, -0.5], "sum", combination_type="cat")
    model.set_adapter("sum")
    wanted = model.merge_and_unload(safe_merge=True).state_dict()
    for name, value in tensors(tmp_path / "fp32").items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_a_weight_of_one_adapter_and_the_command(workspace: Any, tmp_path: Path) -> None:
    import torch

    language, towers = (str(workspace.adapter(name)) for name in ("language", "towers"))
    out = [str(tmp_path / name) for name in ("half", "both", "after")]
    arguments = ["merge", str(workspace.checkpoint), language]
    done = CliRunner().invoke(cli.app, [*arguments, out[0], "--weight", "0.5", "--check", "0", "--dtype", "fp32"])
    assert done.exit_code == 0, done.output
    before, half = (tensors(folder) for folder in (workspace.checkpoint, tmp_path / "half"))
    gemma4_compat.merge_adapter(workspace.checkpoint, language, tmp_path / "whole", check=0, dtype="fp32")
    for name, value in tensors(tmp_path / "whole").items():
        start = before[name].float()
        torch.testing.assert_close(half[name] - start, (value - start) / 2, rtol=1e-3, atol=1e-5)

    done = CliRunner().invoke(cli.app, [*arguments, out[1], "--adapter", f"{towers}=1", "--check", "0"])
    assert done.exit_code == 0, done.output
    assert f"1 * {language} + 1 * {towers}" in done.output
    gemma4_compat.merge_adapter(workspace.checkpoint, language, tmp_path / "first", check=0)
    gemma4_compat.merge_adapter(tmp_path / "first", towers, tmp_path / "after", check=0)
    assert_same(tensors(tmp_path / "both"), tensors(tmp_path / "after"))  # they are on other modules
    for wrong in ("x", "x=", "=1", "x=y", f"{language}=1"):
        done = CliRunner().invoke(cli.app, [*arguments, str(tmp_path / "no"), "--adapter", wrong])
        assert done.exit_code == 2, done.output
    assert not (tmp_path / "no").exists()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dora", "loha", "saved", "tokens", "nan", "none"])
def test_what_has_no_sum_is_refused(workspace: Any, tmp_path: Path, kind: str) -> None:
    import peft

    plain: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]}
    config = {
        "dora": lambda: peft.LoraConfig(**plain, use_dora=True),
        "loha": lambda: peft.LoHaConfig(**plain),
        "saved": lambda: peft.LoraConfig(**plain, modules_to_save=["norm"]),
        "tokens": lambda: peft.LoraConfig(**plain, trainable_token_indices={"embed_tokens": [5]}),
    }.get(kind)
    message = {
        "dora": "is a DoRA, whose change depends",
        "loha": "is of type LOHA: weights are for LoRA",
        "saved": "replaces .*norm.* as a whole",
        "tokens": "trains single tokens of",
        "nan": "must be a number, not nan",
        "none": "no adapter was given",
    }[kind]
    other = workspace.adapter("towers") if config is None else make(workspace.checkpoint, tmp_path / "a", config())
    weights: dict[Any, float] = {workspace.adapter("language"): 1, other: float("nan") if kind == "nan" else 1}
    with pytest.raises(Gemma4CompatError, match=message):
        gemma4_compat.merge_adapter(workspace.checkpoint, {} if kind == "none" else weights, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob("*.partial-*"))
