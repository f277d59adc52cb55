"""Merging adapters: exact against PEFT in float32, the measured parity, and what is left when something goes wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning, cli
from gemma4_compat._checkpoint import shards
from gemma4_compat._merge import check, job, result
from gemma4_compat._reproduction import tiny

LANGUAGE = r".*language_model\.layers\.[024]\..*\.(q_proj|o_proj|down_proj)"


@pytest.fixture(scope="module", autouse=True)
def _stack() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "NEW_TOKENS", 3)  # the time of a check is that of decoding


@pytest.fixture(scope="module")
def base(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with files beside its weights, in three shards."""
    folder: Path = tmp_path_factory.mktemp("base") / "gemma"
    shutil.copytree(workspace.checkpoint, folder)
    entries = shards.checkpoint(folder)
    outputs = [shards.Output(name, entry.dtype, entry.shape) for name, entry in entries.items()]
    files = shards.shards(outputs, 500_000)
    assert len(files) >= 3
    (folder / "model.safetensors").rename(folder / "whole.bin")
    moved = {name: shards.Entry(**{**vars(entry), "file": folder / "whole.bin"}) for name, entry in entries.items()}
    values = {name: lambda e=entry: shards.pieces(e) for name, entry in moved.items()}
    shards.write(folder, files, values)
    (folder / "whole.bin").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "README.md").write_text("the base's card")
    return folder


def randomized(model: Any, *, scale: float = 0.2) -> Any:
    """Weights in everything an adapter trains."""
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = scale * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype))
    return model


def make(checkpoint: Path, folder: Path, config: Any, *, scale: float = 0.2) -> Path:
    """An adapter of that configuration, with random weights."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(0)
    randomized(get_peft_model(tiny.load(checkpoint), config), scale=scale).save_pretrained(folder)
    return folder


def merged_by_peft(checkpoint: Path, adapter: Path) -> dict[str, Any]:
    """The whole model merged by PEFT in float32, then rounded to bf16."""
    import torch
    import transformers
    from peft import PeftModel
    from transformers import AutoConfig

    wanted = getattr(transformers, AutoConfig.from_pretrained(checkpoint).architectures[0])
    model = wanted.from_pretrained(checkpoint, dtype=torch.float32)
    merged = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True)
    return {name: value.to(torch.bfloat16) for name, value in merged.state_dict().items()}


def tensors(folder: Path) -> dict[str, Any]:
    return {name: shards.read(entry) for name, entry in shards.checkpoint(folder).items()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    import torch

    assert not set(found) - set(wanted)
    assert set(wanted) - set(found) <= {"lm_head.weight"}
    different = [name for name, value in found.items() if not torch.equal(value, wanted[name])]
    assert not different


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


# ------------------------------------------------------------------------------------------- the weights, bit for bit


def configs() -> dict[str, Callable[[], Any]]:
    import peft

    plain: dict[str, Any] = {"target_modules": LANGUAGE}
    lora: dict[str, Any] = {"r": 4, "lora_alpha": 8, **plain}
    found: dict[str, Callable[[], Any]] = {
        "lora": lambda: peft.LoraConfig(**lora),
        "rslora": lambda: peft.LoraConfig(use_rslora=True, **lora),
        "dora": lambda: peft.LoraConfig(use_dora=True, **lora),
        "patterns": lambda: peft.LoraConfig(
            rank_pattern={r"layers\.2\..*q_proj": 2}, alpha_pattern={"o_proj": 3}, **lora
        ),
        "towers": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "ffw_layer_1"]),
        "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens_per_layer", "q_proj"]),
        "modules_to_save": lambda: peft.LoraConfig(modules_to_save=["embedding_projection"], **lora),
        "pissa": lambda: peft.LoraConfig(init_lora_weights="pissa", **lora),
        "loha": lambda: peft.LoHaConfig(r=4, **plain),
        "lokr": lambda: peft.LoKrConfig(r=4, **plain),
        "ia3": lambda: peft.IA3Config(
            target_modules=r".*language_model.*\.(k_proj|down_proj)", feedforward_modules=r".*down_proj"
        ),
        "oft": lambda: peft.OFTConfig(oft_block_size=8, use_cayley_neumann=False, **plain),
        "boft": lambda: peft.BOFTConfig(boft_block_size=4, **plain),
        "hra": lambda: peft.HRAConfig(r=4, **plain),
        "miss": lambda: peft.MissConfig(r=4, **plain),
        "fourierft": lambda: peft.FourierFTConfig(n_frequency=50, **plain),
        "ln_tuning": lambda: peft.LNTuningConfig(target_modules=r".*language_model.*input_layernorm"),
    }
    return found


@pytest.mark.parametrize(
    "kind",
    [
        *("lora", "rslora", "dora", "patterns", "towers", "embedding", "modules_to_save", "pissa"),
        *("loha", "lokr", "ia3", "oft", "boft", "hra", "miss", "fourierft", "ln_tuning"),
    ],
)
def test_weights_are_those_of_a_merge_by_peft_in_float32(workspace: Any, tmp_path: Path, kind: str) -> None:
    adapter = make(workspace.checkpoint, tmp_path / "adapter", configs()[kind]())
    report = gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", check=0)
    wanted = merged_by_peft(workspace.checkpoint, adapter)
    found = tensors(tmp_path / "out")
    assert_same(found, wanted)
    before = tensors(workspace.checkpoint)
    changed = [name for name in found if not found[name].equal(before[name])]
    assert len(changed) == report.modules + report.replaced > 0
    assert report.parity is None


def test_experts_merge_through_target_parameters(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    shape, tables = tiny.text_shape(), {"vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 64}
    config = Gemma4TextConfig(
        **shape, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32, **tables
    )
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    parameters = ["layers.1.experts.gate_up_proj", "layers.1.experts.down_proj", "layers.2.experts.down_proj"]
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    randomized(get_peft_model(model, lora)).save_pretrained(tmp_path / "adapter")
    report = gemma4_compat.merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", check=1)
    assert_same(tensors(tmp_path / "out"), merged_by_peft(tmp_path / "base", tmp_path / "adapter"))
    assert report.modules == 6 + 2
    assert report.parity is not None
    assert report.parity.ok


# ------------------------------------------------------------------------------------------------------- tied weights


@pytest.mark.parametrize("kind", ["lora-embedding", "lora-head", "save-embedding", "save-both", "tokens"])
def test_a_head_that_shared_its_weights_answers_as_with_the_adapter(base: Path, tmp_path: Path, kind: str) -> None:
    import torch
    from peft import LoraConfig, PeftModel
    from transformers import Gemma4ForConditionalGeneration

    lora = {"r": 4, "target_modules": LANGUAGE}
    config = {
        "lora-embedding": lambda: LoraConfig(r=4, target_modules=["embed_tokens"]),
        "lora-head": lambda: LoraConfig(r=4, target_modules=["lm_head"]),
        "save-embedding": lambda: LoraConfig(**lora, modules_to_save=["embed_tokens"]),
        "save-both": lambda: LoraConfig(**lora, modules_to_save=["embed_tokens", "lm_head"]),
        "tokens": lambda: LoraConfig(**lora, trainable_token_indices={"embed_tokens": [5, 9]}),
    }[kind]()
    adapter = make(base, tmp_path / "adapter", config, scale=0.05)
    out = tmp_path / "out"
    report = gemma4_compat.merge_adapter(base, adapter, out, check=2)
    assert report.parity is not None
    assert report.parity.ok
    assert report.untied == (kind != "tokens")
    data = json.loads((out / "config.json").read_text())
    assert data["tie_word_embeddings"] == data["text_config"]["tie_word_embeddings"] == (kind == "tokens")
    loaded = PeftModel.from_pretrained(tiny.load(base), adapter)
    merged = Gemma4ForConditionalGeneration.from_pretrained(out, dtype=torch.bfloat16).eval()
    head, embedding = merged.lm_head.weight, merged.model.language_model.embed_tokens.weight
    assert (head is embedding) == (kind == "tokens")
    batch = tiny.inputs()
    with torch.no_grad():
        difference = (loaded(**batch).logits.float() - merged(**batch).logits.float()).abs().max().item()
    assert difference <= 2 * report.parity.bound


# ------------------------------------------------------------------------------------------------ parity, as measured


@pytest.mark.parametrize(
    "quantize, adapter",
    [(None, "language"), ("4bit", "all"), ("4bit-double", "towers"), ("4bit-double", "language"), ("8bit", "all")],
)
def test_answers_are_those_of_the_adapter_on_its_base(
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
    data = json.loads((out / job.REPORT).read_text())
    assert data["parity"]["ok"]
    assert data["parity"]["difference"] == parity.difference
    assert "within bounds" in (out / job.REPORT_TEXT).read_text()
    assert {"config.json", "generation_config.json", "chat_template.jinja", "preprocessor_config.json"} <= {
        file.name for file in out.iterdir()
    }
    assert not (out / "README.md").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    merged = Gemma4ForConditionalGeneration.from_pretrained(out, dtype="auto").eval()
    assert merged.dtype == torch.bfloat16
    loaded = PeftModel.from_pretrained(workspace.load(quantize), folder).eval()
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
    from gemma4_compat._merge import weights as _merge_weights

    exact = _merge_weights.merged

    def again(path: str, model: Any, base: Any, *arguments: Any) -> dict[str, Any]:
        import torch

        found = exact(path, model, base, *arguments)
        return {name: base.round_trip(value.to(torch.bfloat16)) for name, value in found.items()}

    monkeypatch.setattr(_merge_weights, "merged", again)
    out = tmp_path / "out"
    with pytest.raises(result.MergeParityError, match=r"parity is out of bounds: logits differ by .* nothing was"):
        gemma4_compat.merge_adapter(
            workspace.checkpoint, workspace.adapter("language"), out, start="dequantized", quantize="4bit"
        )
    assert not list(tmp_path.iterdir())
    done = CliRunner().invoke(
        cli.app,
        ["merge", str(workspace.checkpoint), str(workspace.adapter("language")), str(out), "--base", "dequantized"],
    )
    assert done.exit_code == 1, done.output
    assert "parity is out of bounds" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["lost", "scale", "one layer"])
def test_subtle_losses_are_out_of_bounds(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    from gemma4_compat._merge import weights as _merge_weights

    exact = _merge_weights.merged

    def less(path: str, model: Any, base: Any, *arguments: Any) -> dict[str, Any]:
        found = exact(path, model, base, *arguments)
        kept = {"lost": 0.0, "scale": 0.8, "one layer": 0.0 if ".layers.3." in path else 1.0}[wrong]
        start = {name: base.read(name).float() for name in found}
        return {name: start[name] + kept * (value - start[name]) for name, value in found.items()}

    monkeypatch.setattr(_merge_weights, "merged", less)
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


def test_a_nan_is_out_of_bounds() -> None:
    spread = check._Spread()
    import torch

    spread.add(torch.zeros(3), torch.tensor([0.0, float("nan"), 1.0]))
    spread.add(torch.zeros(3), torch.ones(3))
    assert spread.largest != spread.largest


@pytest.mark.parametrize("dtype, start", [("fp16", "original"), ("fp32", "original"), ("fp32", "dequantized")])
def test_dtypes(workspace: Any, tmp_path: Path, dtype: str, start: str) -> None:
    report = gemma4_compat.merge_adapter(
        workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", dtype=dtype, start=start, check=1
    )
    assert report.parity.ok
    assert report.assumed == (start == "dequantized")
    wanted = job.DTYPES[dtype]
    assert {entry.dtype for entry in shards.checkpoint(tmp_path / "out").values()} == {wanted}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == wanted
    if dtype == "fp32":
        assert report.parity.difference < 0.01


def test_a_checkpoint_of_the_language_model_alone(tmp_path: Path) -> None:
    import peft
    from peft import get_peft_model
    from transformers import Gemma4ForCausalLM

    folder = tiny.build_text_checkpoint(tmp_path / "base")
    model = Gemma4ForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    randomized(get_peft_model(model, config)).save_pretrained(tmp_path / "adapter")
    report = gemma4_compat.merge_adapter(folder, tmp_path / "adapter", tmp_path / "out")
    assert report.model_class == "Gemma4ForCausalLM"
    assert report.parity.ok
    assert len(report.parity.prompts) == 4
    assert_same(tensors(tmp_path / "out"), merged_by_peft(folder, tmp_path / "adapter"))


def test_an_adapter_of_another_class_is_translated(workspace: Any, tmp_path: Path) -> None:
    """Trained on the language model alone, merged into the whole model; patterns and all."""
    import peft
    from peft import get_peft_model
    from transformers import Gemma4ForCausalLM

    folder = tiny.build_text_checkpoint(tmp_path / "text")
    patterns = {"alpha_pattern": {r"^model\.layers\.2\.self_attn\.q_proj": 5}, "rank_pattern": {"up_proj": 2}}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=r"model\.layers\.\d\..*(q_proj|up_proj)", **patterns)
    randomized(get_peft_model(Gemma4ForCausalLM.from_pretrained(folder), config)).save_pretrained(
        tmp_path / "text-adapter"
    )
    report = gemma4_compat.merge_adapter(workspace.checkpoint, tmp_path / "text-adapter", tmp_path / "out", check=1)
    assert report.parity.ok
    assert report.modules == 12

    there = r".*language_model\.layers\.\d\..*(q_proj|up_proj)"
    patterns["alpha_pattern"] = {r".*language_model\.layers\.2\.self_attn\.q_proj": 5}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=there, **patterns)
    same = make(workspace.checkpoint, tmp_path / "same", config)
    from safetensors.torch import load_file, save_file

    values = load_file(tmp_path / "text-adapter" / "adapter_model.safetensors")
    renamed = {key.replace("model.model.layers", "model.model.language_model.layers"): v for key, v in values.items()}
    assert set(renamed) == set(load_file(same / "adapter_model.safetensors"))
    save_file(renamed, same / "adapter_model.safetensors")
    assert_same(tensors(tmp_path / "out"), merged_by_peft(workspace.checkpoint, same))


# --------------------------------------------------------------------------------------------- bases in 4 bits on disk


@pytest.mark.parametrize("quantization", ["4bit-double", "8bit"])
def test_a_base_that_is_quantized_on_disk(workspace: Any, tmp_path: Path, quantization: str) -> None:
    import torch

    stored = tmp_path / "stored"
    workspace.load(quantization).save_pretrained(stored)
    adapter = workspace.adapter("language")
    with pytest.raises(Gemma4CompatError, match=r"quantized on disk: .* --base dequantized"):
        gemma4_compat.merge_adapter(stored, adapter, tmp_path / "out")
    report = gemma4_compat.merge_adapter(stored, adapter, tmp_path / "out", start="dequantized", check=1)
    assert report.quantization == quantization
    assert not report.assumed
    assert report.parity.ok
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    gemma4_compat.merge_adapter(
        workspace.checkpoint, adapter, tmp_path / "same", start="dequantized", quantize=quantization, check=0
    )
    found, wanted = tensors(tmp_path / "out"), tensors(tmp_path / "same")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_dequantized_weights_are_those_the_loaded_base_computes_with(workspace: Any, tmp_path: Path) -> None:
    import torch
    from bitsandbytes.functional import dequantize_4bit

    gemma4_compat.merge_adapter(
        workspace.checkpoint,
        workspace.adapter("towers"),
        tmp_path / "out",
        start="dequantized",
        quantize="4bit",
        check=0,
    )
    found = tensors(tmp_path / "out")
    model = workspace.load("4bit")
    seen = 0
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear4bit" and "language_model" in name:
            wanted = dequantize_4bit(module.weight.data, module.weight.quant_state)
            assert torch.equal(found[f"{name}.weight"], wanted), name
            seen += 1
    assert seen > 30


# ------------------------------------------------------------------------------------------------- what cannot be done


def broken(folder: Path, how: str) -> None:
    """Spoil an adapter."""
    import torch
    from safetensors.torch import load_file, save_file

    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    values, data = load_file(weights), json.loads(config.read_text())
    first = next(key for key in values if "lora_B" in key)
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no header":
        weights.write_bytes(b"not safetensors at all")
    elif how == "pickle":
        torch.save(values, folder / "adapter_model.bin")
        weights.unlink()
    elif how == "rank":
        config.write_text(json.dumps(data | {"r": 3}))
    elif how == "shape":
        save_file(values | {first: torch.zeros(7, 4)}, weights)
    elif how == "type":
        config.write_text(json.dumps(data | {"peft_type": "NEWTUNER"}))
    elif how == "prompt":
        config.write_text(json.dumps(data | {"peft_type": "PROMPT_TUNING"}))
    elif how == "shared":
        config.write_text(json.dumps(data | {"peft_type": "VERA"}))
    elif how == "other model":
        save_file({key.replace("q_proj", "query"): value for key, value in values.items() if "q_proj" in key}, weights)
    elif how == "some keys":
        save_file(values | {"base_model.model.transformer.h.0.attn.lora_A.weight": torch.zeros(4, 4)}, weights)
    elif how == "half a module":
        save_file({key: value for key, value in values.items() if key != first}, weights)
    elif how == "nan":
        save_file(values | {first: torch.full_like(values[first], float("nan"))}, weights)
    elif how == "no config":
        config.unlink()
    elif how == "no JSON":
        config.write_text("{")
    elif how == "empty":
        save_file({}, weights)


@pytest.mark.parametrize(
    "how, message",
    [
        ("truncated", r"is truncated: it has \d+ bytes and its header describes \d+"),
        ("no header", r"is no safetensors file"),
        ("pickle", r"is a pickle .* --allow-pickle"),
        ("rank", r"the adapter does not fit .*down_proj.* size mismatch"),
        ("shape", r"the adapter does not fit .* size mismatch"),
        ("type", r"type 'NEWTUNER', which peft .* does not know"),
        ("prompt", r"PROMPT_TUNING changes the prompt, not the weights"),
        ("shared", r"VERA are not merged module by module"),
        ("other model", r"not one of the \d+ keys of the adapter"),
        ("some keys", r"1 keys of the adapter .* belong to no module"),
        ("half a module", r"the file lacks .*lora_B"),
        ("nan", r"PEFT cannot merge the adapter of .*NaN"),
        ("no config", r"there is no adapter_config.json"),
        ("no JSON", r"adapter_config.json' cannot be read"),
        ("empty", r"has no weights"),
    ],
)
def test_a_bad_adapter_is_one_clear_error(
    workspace: Any, tmp_path: Path, how: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    broken(adapter, how)
    with pytest.raises(Gemma4CompatError, match=f"(?s){message}"):
        gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", check=0)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_pickle_is_read_when_allowed_and_never_runs_code(workspace: Any, tmp_path: Path) -> None:
    import torch

    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    broken(adapter, "pickle")
    for name, folder, options in (
        ("out", adapter, {"allow_pickle": True}),
        ("same", workspace.adapter("language"), {}),
    ):
        gemma4_compat.merge_adapter(workspace.checkpoint, folder, tmp_path / name, check=0, **options)
    assert_same(tensors(tmp_path / "out"), tensors(tmp_path / "same"))
    torch.save({"weight": Trap(tmp_path / "ran")}, adapter / "adapter_model.bin")
    with pytest.raises(Gemma4CompatError, match="cannot be read as tensors alone"):
        gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "new", check=0, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_targets_without_weights_are_said(workspace: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    file = adapter / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if "layers.2.mlp.up_proj" not in key}, file)
    with pytest.warns(
        Gemma4CompatWarning, match=r"targets 1 modules that its file has no weights for, .*2.mlp.up_proj"
    ):
        report = gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out", check=0)
    assert report.absent == ("model.language_model.layers.2.mlp.up_proj",)


@pytest.mark.parametrize(
    "how, message",
    [
        ("truncated", r"is truncated"),
        ("missing shard", r"names the shard .*, which is not in"),
        ("llama", r"is a llama model"),
        ("no weights", r"there are no weights in safetensors"),
        ("no config", r"there is no config.json"),
        ("smaller", r"is \[64, 128\] in the weights and \[64, 96\] by config.json"),
    ],
)
def test_a_bad_base_is_one_clear_error(workspace: Any, base: Path, tmp_path: Path, how: str, message: str) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif how == "missing shard":
        shard.unlink()
    elif how == "llama":
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    elif how == "no weights":
        for file in folder.glob("model*"):
            file.unlink()
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "smaller":
        data = json.loads((folder / "config.json").read_text())
        data["text_config"]["intermediate_size"] = 96
        (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(Gemma4CompatError, match=message):
        gemma4_compat.merge_adapter(folder, workspace.adapter("language"), tmp_path / "out", check=0)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"start": "other"}, "base 'other' is unknown"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"check": -1}, "check is a number of prompts"),
        ({"tolerance": -1.0}, "tolerance is a difference of logits"),
        ({"max_shard_size": "much"}, "'much' is not a size"),
        ({"max_shard_size": 0}, "max_shard_size must be more than 0"),
        ({"quantize": "4bit"}, "are for --base dequantized"),
        ({"quantize": "2bit", "start": "dequantized"}, "quantization '2bit' is unknown"),
    ],
)
def test_bad_options_are_one_clear_error(workspace: Any, tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(Gemma4CompatError, match=message):
        gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(workspace: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    for target in (out, out / "mine.txt"):
        with pytest.raises(Gemma4CompatError, match="exists; nothing is overwritten"):
            gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), target)
    assert (out / "mine.txt").read_text() == "kept"
    with pytest.raises(Gemma4CompatError, match="no folder and not in the cache"):
        gemma4_compat.merge_adapter("nobody/nothing", workspace.adapter("language"), tmp_path / "new")
    (out / "mine.txt").unlink()
    gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), out, check=0)
    assert (out / "model.safetensors").is_file()


# ------------------------------------------------------------------------------------------------------ interruptions


@pytest.mark.parametrize("when", ["writing", "checking"])
@pytest.mark.parametrize(
    "what", [KeyboardInterrupt(), MemoryError(), OSError(errno.ENOSPC, "No space left"), "SIGTERM"]
)
def test_nothing_is_left_when_it_is_cut_short(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, when: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        assert list(tmp_path.iterdir()), "it fails while there is something to clean up"
        if what == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            return b""
        raise what

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(*((shards, "_bytes") if when == "writing" else (check, "compare")), fail)
    wanted = SystemExit if what == "SIGTERM" else type(what)
    if isinstance(what, OSError) and when == "writing":
        wanted = Gemma4CompatError
    with pytest.raises(wanted) as caught:
        gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", check=1)
    if wanted is Gemma4CompatError:
        assert "the disk is full" in str(caught.value)
        assert "model.safetensors' needs" in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_full_disk_is_seen_before_anything_is_written(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(10, 5, 5))
    with pytest.raises(Gemma4CompatError, match=r"has 5 bytes free and the merged model needs \d{6,}"):
        gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------- command line


def test_the_command_merges_reports_and_exits(workspace: Any, base: Path, tmp_path: Path) -> None:
    arguments = ["merge", str(base), str(workspace.adapter("language")), str(tmp_path / "out")]
    options = ["--base", "dequantized", "--quantize", "4bit", "--check", "1", "--device-map", '{"": "cpu"}', "--json"]
    done = CliRunner().invoke(cli.app, arguments + options)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert data["parity"]["ok"]
    assert data["quantization"] == "4bit"
    done = CliRunner().invoke(cli.app, [*arguments[:3], str(tmp_path / "more"), "--check", "0", "--dtype", "fp32"])
    assert done.exit_code == 0, done.output
    assert "not measured (--check 0)" in done.output
    for wrong in (arguments, [*arguments[:3], str(tmp_path / "x"), "--device-map", "{"], [*arguments, "--base", "x"]):
        assert CliRunner().invoke(cli.app, wrong).exit_code == 2


def test_the_help_says_when_each_base_is_right() -> None:
    done = CliRunner().invoke(cli.app, ["merge", "--help"], terminal_width=200)
    text = " ".join(done.output.replace("│", " ").split())
    assert "right when the merged model is used in bf16" in text
    assert "right when the adapter was trained and judged on the quantized base" in text
