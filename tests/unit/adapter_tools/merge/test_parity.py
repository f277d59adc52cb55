"""The measured parity of a merged model, with its tied weights, and merges that are out of bounds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._adapter_tools.merge import check, result
from gemma4_compat._gemma4.checkpoint import folders
from gemma4_compat._lab import tiny, tiny_configs
from tests.unit.adapter_tools.merge.adapters import LANGUAGE, assert_same, digests, make, merged_by_peft, tensors

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "quantize, adapter",
    [(None, "language"), ("4bit", "all"), ("4bit-double", "towers"), ("4bit-double", "language"), ("8bit", "all")],
)
def test_outputs_are_those_of_the_adapter_on_its_base(
    workspace: Any, base: Path, tmp_path: Path, quantize: str | None, adapter: str
) -> None:
    """The whole way, then the folder loaded by hand: it gives the logits the report claims."""
    import torch
    from peft import PeftModel
    from transformers import Gemma4ForConditionalGeneration

    folder, out = workspace.adapter(adapter), tmp_path / "out"
    before = digests(base), digests(folder)
    start = "original" if quantize is None else "dequantized"
    report = gemma4_compat.merge_adapter(base, folder, out, start=start, quantize=quantize, max_shard_size="400KB")
    assert (digests(base), digests(folder)) == before
    parity = report.parity
    assert parity is not None
    assert parity.ok
    assert 0 < parity.difference <= parity.bound
    assert parity.difference_rms <= parity.bound_rms < parity.effect_rms  # a lost adapter would be seen
    assert len(parity.prompts) == 5
    assert report.quantization == quantize
    assert bool(report.dequantized) == (quantize is not None)

    assert len(report.files) > 2
    assert set(json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].values()) == set(
        report.files
    )
    data = json.loads((out / folders.REPORT).read_text())
    assert data["parity"]["ok"]
    assert data["parity"]["difference"] == parity.difference
    assert "within bounds" in (out / folders.REPORT_TEXT).read_text()
    assert {"config.json", "generation_config.json", "chat_template.jinja", "preprocessor_config.json"} <= {
        file.name for file in out.iterdir()
    }
    assert not (out / "README.md").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    merged = Gemma4ForConditionalGeneration.from_pretrained(out, dtype="auto").eval()
    assert merged.dtype == torch.bfloat16
    loaded = PeftModel.from_pretrained(tiny.load(workspace.checkpoint, quantize, towers=True), folder).eval()
    for module in loaded.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True
    batch = tiny.inputs()
    with torch.no_grad():
        found, wanted = merged(**batch).logits.float(), loaded(**batch).logits.float()
    if quantize != "8bit":  # its kernel rounds activations
        assert (found - wanted).square().mean().sqrt().item() <= 2 * parity.bound_rms


def test_a_merge_into_4_bits_is_out_of_bounds_and_leaves_nothing(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What merge_and_unload does on a quantized base: the merged weight is quantized again."""
    from gemma4_compat._adapter_tools.merge import one_module

    exact = one_module.merged

    def again(path: str, model: Any, base: Any, *arguments: Any) -> dict[str, Any]:
        import torch

        found = exact(path, model, base, *arguments)
        return {name: base.round_trip(value.to(torch.bfloat16)) for name, value in found.items()}

    monkeypatch.setattr(one_module, "merged", again)
    out = tmp_path / "out"
    with pytest.raises(result.MergeParityError, match=r"parity is out of bounds: logits differ by .* nothing was"):
        gemma4_compat.merge_adapter(
            workspace.checkpoint, workspace.adapter("language"), out, start="dequantized", quantize="4bit"
        )
    assert not list(tmp_path.iterdir())
    done = CliRunner().invoke(
        cli.app,
        ["merge", str(workspace.checkpoint), str(workspace.adapter("language")), str(out), "--start", "dequantized"],
    )
    assert done.exit_code == 1, done.output
    assert "parity is out of bounds" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["lost", "scale", "one layer"])
def test_subtle_losses_are_out_of_bounds(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    from gemma4_compat._adapter_tools.merge import one_module

    exact = one_module.merged

    def less(path: str, model: Any, base: Any, *arguments: Any) -> dict[str, Any]:
        found = exact(path, model, base, *arguments)
        kept = {"lost": 0.0, "scale": 0.8, "one layer": 0.0 if ".layers.3." in path else 1.0}[wrong]
        start = {name: base.read(name).float() for name in found}
        return {name: start[name] + kept * (value - start[name]) for name, value in found.items()}

    monkeypatch.setattr(one_module, "merged", less)
    with pytest.raises(result.MergeParityError) as caught:
        gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out")
    assert not caught.value.report.parity.ok
    assert not list(tmp_path.iterdir())


def test_a_tolerance_replaces_the_bound(workspace: Any, tmp_path: Path) -> None:
    arguments = (workspace.checkpoint, workspace.adapter("language"), tmp_path / "out")
    with pytest.raises(result.MergeParityError, match=r"the bound is 1e-06"):
        gemma4_compat.merge_adapter(*arguments, tolerance=1e-6, check=1)
    report = gemma4_compat.merge_adapter(*arguments, tolerance=1000, check=1)
    assert (report.parity.bound, report.parity.bound_rms) == (1000, None)


@pytest.mark.parametrize("text_only", [False, True])
def test_prompts_of_a_model_with_several_end_tokens(tmp_path: Path, text_only: bool) -> None:
    config = tiny_configs.config()
    config = config.get_text_config() if text_only else config
    config.eos_token_id = [1, 106]
    found, _ = check.prompts(tmp_path, SimpleNamespace(config=config), 2, ())
    assert not {1, 106} & set(found[0].batch["input_ids"][0].tolist())


def test_a_nan_is_out_of_bounds() -> None:
    spread = check._Spread()
    import torch

    spread.add(torch.zeros(3), torch.tensor([0.0, float("nan"), 1.0]))
    spread.add(torch.zeros(3), torch.ones(3))
    assert spread.largest != spread.largest


KINDS = {  # of adapter on the embedding or the head -> whether both have the same values afterwards
    "lora-embedding": False,
    "dora-embedding": False,
    "lora-head": False,
    "lora-both": False,
    "lora-both-tied": True,
    "lora-both-cast-apart": False,
    "save-embedding": False,
    "save-embedding-tied": True,
    "save-both": False,
    "tokens": True,
    "tokens-of-head": False,
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_untied_head_gives_the_outputs_of_the_adapter(base: Path, tmp_path: Path, kind: str) -> None:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import Gemma4ForConditionalGeneration

    both = ["embed_tokens", "lm_head"]
    lora: dict[str, Any] = {"r": 4, "target_modules": LANGUAGE}
    config = {
        "lora-embedding": lambda: LoraConfig(r=4, target_modules=["embed_tokens"]),
        "dora-embedding": lambda: LoraConfig(r=4, use_dora=True, target_modules=["embed_tokens"]),
        "lora-both": lambda: LoraConfig(r=4, target_modules=both),
        "lora-both-tied": lambda: LoraConfig(r=4, target_modules=both, ensure_weight_tying=True),
        "lora-both-cast-apart": lambda: LoraConfig(r=4, target_modules=both, ensure_weight_tying=True),
        "save-embedding-tied": lambda: LoraConfig(**lora, modules_to_save=["embed_tokens"], ensure_weight_tying=True),
        "tokens-of-head": lambda: LoraConfig(**lora, trainable_token_indices={"lm_head": [5, 9]}),
        "lora-head": lambda: LoraConfig(r=4, target_modules=["lm_head"]),
        "save-embedding": lambda: LoraConfig(**lora, modules_to_save=["embed_tokens"]),
        "save-both": lambda: LoraConfig(**lora, modules_to_save=both),
        "tokens": lambda: LoraConfig(**lora, trainable_token_indices={"embed_tokens": [5, 9]}),
    }[kind]()
    adapter = make(base, tmp_path / "adapter", config, scale=0.05)
    if kind == "lora-both-tied":
        tie(adapter / "adapter_model.safetensors")
    out, tied = tmp_path / "out", KINDS[kind]
    report = gemma4_compat.merge_adapter(base, adapter, out, check=2)
    assert report.parity is not None
    assert report.parity.ok
    assert report.untied == (not tied)
    if kind != "lora-both-cast-apart":  # on a float32 base, PEFT gives both what it reads last
        assert_same(tensors(out), merged_by_peft(base, adapter, untied=kind.startswith("lora") or not tied))
    data = json.loads((out / "config.json").read_text())
    assert data["tie_word_embeddings"] == data["text_config"]["tie_word_embeddings"] == tied
    loaded = PeftModel.from_pretrained(tiny.load(base), adapter)
    merged = Gemma4ForConditionalGeneration.from_pretrained(out, dtype=torch.bfloat16).eval()
    head, embedding = merged.lm_head.weight, merged.model.language_model.embed_tokens.weight
    assert (head is embedding) == tied
    batch = tiny.inputs()
    with torch.no_grad():
        difference = (loaded(**batch).logits.float() - merged(**batch).logits.float()).abs().max().item()
    assert difference <= 2 * report.parity.bound


def tie(file: Path) -> None:
    """Give the head's LoRA the embedding's values, as a training on a float32 base leaves them."""
    from safetensors.torch import load_file, save_file

    values = load_file(file)
    embedding = next(key for key in values if key.endswith("lora_embedding_A")).removesuffix("lora_embedding_A")
    for name, other in (("lora_A", "lora_embedding_B"), ("lora_B", "lora_embedding_A")):
        values[f"base_model.model.lm_head.{name}.weight"] = values[embedding + other].T.contiguous()
    save_file(values, file)
