"""Adapters against a base: what the scan says is what PEFT does when it loads them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

import peft
import transformers

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._adapters import saved as _saved_adapter
from gemma4_compat._checkpoint import header
from gemma4_compat._models import build
from gemma4_compat._reproduction import tiny
from gemma4_compat._scan import job
from tests.adapters.adapter_files import PREFIX, as_in_the_forum_thread, write_adapter

HAS_UNIFIED = hasattr(transformers, "Gemma4UnifiedConfig")
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: transformers that builds keys and values for KV-shared layers, as it did at first
OWN_KV = "model.language_model.layers.5.self_attn.k_proj"


def scan(adapter: Path, base: Any, **options: Any) -> job.Scan:
    return gemma4_compat.scan_adapter(adapter, base, **options)


def ids(found: job.Scan) -> list[str]:
    return [problem.id for problem in found.problems]


def hits(found: job.Scan) -> dict[tuple[str, str], int]:
    return {(hit.tower, hit.kind): hit.modules for hit in found.hits}


@pytest.fixture
def bare(workspace: Any, tmp_path: Path) -> Path:
    """The checkpoint without its weights, which a scan does not need."""
    folder = tmp_path / "base"
    folder.mkdir()
    shutil.copy(workspace.checkpoint / "config.json", folder)
    return folder


@pytest.fixture
def changed(workspace: Any, tmp_path: Path) -> Callable[..., Path]:
    """``changed(name, keys=..., **settings)``: an adapter of the workspace with other keys, or other settings."""

    def change(name: str, keys: Callable[[str], str | None] = lambda key: key, **settings: Any) -> Path:
        saved = _saved_adapter.read(workspace.adapter(name))
        shapes = {keys(key): tensor.shape for key, tensor in saved.tensors.items()}
        return write_adapter(
            tmp_path / "changed", {key: shape for key, shape in shapes.items() if key}, {**saved.config, **settings}
        )

    return change


# ------------------------------------------------------------------------------------------- what loads has no problem


@pytest.mark.parametrize("name", ["language", "towers", "all"])
def test_the_scan_counts_the_layers_that_peft_adapts(workspace: Any, bare: Path, name: str) -> None:
    found = scan(workspace.adapter(name), bare)
    assert ids(found) == []
    model = peft.PeftModel.from_pretrained(workspace.load(None), workspace.adapter(name))
    layers = [path for path, module in model.named_modules() if hasattr(module, "lora_A")]
    assert Counter(job.tower_of(path) for path in layers) == Counter(
        {tower: sum(hit.modules for hit in found.hits if hit.tower == tower) for tower in found.keys}
    )
    weights = [tensor for path, tensor in model.named_parameters() if "lora_" in path]
    assert sum(found.keys.values()) == len(weights)
    assert found.nbytes == sum(tensor.numel() * 4 for tensor in weights)
    assert found.ranks == {4: len(layers)}
    kinds = {"text": "linear", "vision": "clipped linear", "audio": "clipped linear"}
    assert {(hit.tower, hit.kind) for hit in found.hits} == {(tower, kinds[tower]) for tower in found.keys}
    assert (found.base, found.model_class) == (str(bare), "Gemma4ForConditionalGeneration")


LORA = {"r": 4, "target_modules": ["q_proj"]}
CONFIGS: dict[str, Callable[[], Any]] = {
    "wrapper names": lambda: peft.LoraConfig(r=4, target_modules=NAMES),
    "all-linear": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "rank_pattern": lambda: peft.LoraConfig(**LORA, use_rslora=True, rank_pattern={"layers.0.self_attn.q_proj": 8}),
    "modules_to_save": lambda: peft.LoraConfig(**LORA, modules_to_save=["embed_vision", "lm_head"]),
    "tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 2]),
    "embedding": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "embed_tokens_per_layer"]),
    "bias": lambda: peft.LoraConfig(**LORA, bias="all"),
    "pissa": lambda: peft.LoraConfig(**LORA, init_lora_weights="pissa"),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": lambda: peft.LoHaConfig(**LORA),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=["o_proj"]),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2], target_modules=["embed_tokens"]),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


def saved_with(config: Any, model: Any, folder: Path) -> Path:
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")  # PEFT's about its own settings
@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_saved_has_no_problem_on_the_same_base(
    workspace: Any, bare: Path, tmp_path: Path, name: str
) -> None:
    config = CONFIGS[name]()
    found = scan(saved_with(config, workspace.load(None), tmp_path / "adapter"), bare)
    assert ids(found) == []
    assert (found.remapped, found.dead) == ({}, ())
    assert found.peft_type == config.peft_type.value
    assert sum(found.keys.values()) == len(_saved_adapter.read(tmp_path / "adapter").tensors)
    assert bool(found.hits) is (name != "prompt")


@pytest.mark.filterwarnings("ignore")
def test_kinds_of_what_is_hit(workspace: Any, bare: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["embed_tokens_per_layer"], modules_to_save=["embed_vision"])
    found = scan(saved_with(config, workspace.load(None), tmp_path / "adapter"), bare)
    assert hits(found) == {("embeddings", "embedding"): 1, ("bridges", "full weight of linear"): 1}
    assert found.settings["modules_to_save"] == ["embed_vision"]


def test_settings_with_dora_and_ranks(workspace: Any, bare: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(**LORA, use_dora=True, rank_pattern={"layers.0.self_attn.q_proj": 8})
    found = scan(saved_with(config, workspace.load(None), tmp_path / "adapter"), bare)
    assert found.settings["use_dora"] is True
    assert 8 in found.settings["rank_pattern"].values()
    assert set(found.ranks) == {4, 8}
    assert sum(found.ranks.values()) == sum(hit.modules for hit in found.hits)


def test_expert_parameters(tmp_path: Path) -> None:
    import torch

    config = tiny.config()
    for name, value in {
        "enable_moe_block": True,
        "num_experts": 4,
        "moe_intermediate_size": 64,
        "top_k_experts": 2,
    }.items():
        setattr(config.text_config, name, value)
    with torch.device("meta"):
        model = transformers.Gemma4ForConditionalGeneration._from_config(config)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    adapter = peft.LoraConfig(r=4, target_modules=[], target_parameters=names)
    shapes = expected_shapes(adapter, model)
    folder = write_adapter(tmp_path, shapes, json_of(adapter))
    found = scan(folder, config)
    assert ids(found) == []
    assert hits(found) == {("text", "expert parameter"): 6}
    assert found.ranks == {4: 12}
    assert found.settings["target_parameters"] == names


def expected_shapes(config: Any, model: Any) -> dict[str, tuple[int, ...]]:
    adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    own = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {key: tuple(tensor.shape) for key, tensor in own.items()}


def json_of(config: Any) -> dict[str, Any]:
    data = config.to_dict()
    data = {key: sorted(value) if isinstance(value, set) else value for key, value in data.items()}
    return json.loads(json.dumps(data, default=str)) | {"peft_type": config.peft_type.value}


# ---------------------------------------------------------------------------------------------- other names, dead ones


def test_the_adapter_of_the_forum_thread_on_e2b_by_name(tmp_path: Path) -> None:
    """786 keys; those of the 20 KV-shared layers' keys and values have no use where transformers builds none."""
    model, *_ = build.on_meta("E2B")
    built = {name for name, _ in model.named_modules()}
    names = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in as_in_the_forum_thread()}
    here = sorted(names & built)
    config = peft.LoraConfig(r=16, target_modules=here)
    data = json_of(config)
    known = expected_shapes(config, model)
    shapes = {key: known.get(key, (16, 1536)) for key in as_in_the_forum_thread()}
    found = scan(write_adapter(tmp_path, shapes, data | {"target_modules": sorted(names)}), "E2B")
    assert ids(found) == []
    assert found.keys == {"text": 490, "vision": 224, "audio": 72}
    assert len(found.dead) == 2 * len(names - built)
    assert len(found.dead) in (0, 80)
    assert len(found.hits) == 3
    assert "conversion script" in found.notes[0]
    assert found.base == "google/gemma-4-E2B-it"


def test_keys_on_the_wrapper_are_renamed_to_its_inner_layer(changed: Any, bare: Path) -> None:
    folder = changed("towers", lambda key: key.replace(".linear.", "."), target_modules=tiny.TARGETS["towers"])
    found = scan(folder, bare)
    assert ids(found) == []
    assert len(found.remapped) == sum(found.keys.values()) == 40
    assert hits(found) == {("vision", "clipped linear"): 10, ("audio", "clipped linear"): 10}
    assert len(found.redirected) == 20
    assert all(name == key.replace(".lora_", ".linear.lora_") for key, name in found.remapped.items())


def test_an_adapter_of_the_text_model_is_renamed(bare: Path, tmp_path: Path) -> None:
    model = transformers.Gemma4ForCausalLM(tiny.config().text_config)
    folder = saved_with(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), model, tmp_path / "adapter")
    found = scan(folder, bare)
    assert found.saved_from == "Gemma4ForCausalLM"
    assert ids(found) == []
    assert set(found.keys) == {"text"}
    assert len(found.remapped) == found.keys["text"]
    assert found.remapped[f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"] == (
        f"{PREFIX}model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    )
    assert found.notes == ()
    gemma4_compat.revert("peft-adapter-keys")
    try:
        found = scan(folder, bare)
    finally:
        gemma4_compat.install()
    assert ids(found) == ["renamed"]
    assert len(found.problems[0].keys) == found.keys["text"]
    assert [note.split(",")[0] for note in found.notes] == [
        "the targets also reach vision",
        "the targets also reach audio",
    ]


def test_targets_in_the_words_of_another_class_are_fitted(bare: Path, tmp_path: Path) -> None:
    model = transformers.Gemma4ForCausalLM(tiny.config().text_config)
    config = peft.LoraConfig(r=4, target_modules=r"model\.layers\.\d+\.self_attn\.q_proj")
    found = scan(saved_with(config, model, tmp_path / "adapter"), bare)
    assert ids(found) == []
    assert hits(found) == {("text", "linear"): 6}


def test_keys_of_layers_that_share_keys_and_values_have_no_use(changed: Any, workspace: Any, bare: Path) -> None:
    model, *_ = build.on_meta(str(bare))
    if OWN_KV in dict(model.named_modules()):
        pytest.skip("this transformers builds keys and values for KV-shared layers")
    saved = _saved_adapter.read(workspace.adapter("language"))
    extra = {f"{PREFIX}{OWN_KV}.lora_{half}.weight": shape for half, shape in {"A": (4, 64), "B": (64, 4)}.items()}
    shapes = {key: tensor.shape for key, tensor in saved.tensors.items()} | extra
    found = scan(write_adapter(bare.parent / "adapter", shapes, saved.config), bare)
    assert ids(found) == []
    assert set(found.dead) == set(extra)
    assert found.keys == {"text": 78}


# ------------------------------------------------------------------------------------------------------------ problems


def test_an_adapter_of_a_larger_model(workspace: Any) -> None:
    result = CliRunner().invoke(cli.app, ["scan", str(workspace.adapter("language")), "E2B"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].endswith(("problem:", "problems:"))
    assert "  - shape: " in result.stdout.splitlines()[1]
    found = scan(workspace.adapter("language"), "E2B")
    (problem,) = [item for item in found.problems if item.id == "shape"]
    assert "is [4, 128] instead of [4, 6144]" in problem.message
    assert len(problem.keys) == found.keys["text"] == sum(found.keys.values())


def test_a_rank_that_the_configuration_does_not_say(changed: Any, workspace: Any, bare: Path) -> None:
    found = scan(changed("all", r=8), bare)
    assert ids(found) == ["rank"]
    assert len(found.problems[0].keys) == sum(found.keys.values())
    assert "is [4, 64] instead of [8, 64]" in found.problems[0].message
    with pytest.raises(RuntimeError, match=r"\[4, 64\]"):
        peft.PeftModel.from_pretrained(workspace.load(None), found.adapter)


def test_targets_that_leave_keys_out(changed: Any, bare: Path) -> None:
    found = scan(changed("all", target_modules=tiny.TARGETS["language"]), bare)
    assert ids(found) == ["untargeted"]
    assert len(found.problems[0].keys) == found.keys["vision"] + found.keys["audio"]


def test_targets_that_the_file_has_nothing_for(changed: Any, bare: Path) -> None:
    found = scan(changed("language", lambda key: None if "layers.1." in key else key), bare)
    assert ids(found) == ["missing"]
    assert len(found.problems[0].keys) == 14
    assert all(".layers.1." in key for key in found.problems[0].keys)


def test_a_layer_with_half_of_its_weights(changed: Any, bare: Path) -> None:
    lost = f"{PREFIX}model.language_model.layers.1.mlp.up_proj.lora_B.weight"
    found = scan(changed("language", lambda key: None if key == lost else key), bare)
    assert ids(found) == ["half", "missing"]
    assert found.problems[1].keys == (lost,)


def test_keys_of_another_model(changed: Any, bare: Path) -> None:
    found = scan(changed("language", lambda key: key.replace("language_model.layers", "transformer.h")), bare)
    assert ids(found)[0] == "unmatched"
    assert "all keys are of no module that this base has" in found.problems[0].message
    assert found.hits == ()


def test_tower_keys_on_a_base_without_towers(workspace: Any, tmp_path: Path) -> None:
    base = tiny.build_text_checkpoint(tmp_path / "text")
    found = scan(workspace.adapter("all"), base)
    assert ids(found)[0] == "unmatched"
    assert len(found.problems[0].keys) == 48
    assert hits(found) == {("text", "linear"): found.keys["text"] // 2}
    assert len(found.remapped) == found.keys["text"]


def test_targets_that_match_nothing_are_refused_by_peft_and_the_scan_says_so(changed: Any, bare: Path) -> None:
    found = scan(changed("language", target_modules=["nothing_proj"]), bare)
    assert ids(found)[0] == "refused"
    assert f"PEFT {peft.__version__} refuses it" in found.problems[0].message
    assert "nothing_proj" in found.problems[0].message


@pytest.mark.filterwarnings("ignore")
def test_a_trained_copy_of_a_quantized_weight(workspace: Any, bare: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(**LORA, modules_to_save=["embed_vision"])
    folder = saved_with(config, workspace.load(None), tmp_path / "adapter")
    found = scan(folder, bare, quantize="4bit")
    assert ids(found) == ["quantized"]
    with pytest.raises((KeyError, RuntimeError)):
        peft.PeftModel.from_pretrained(workspace.load("4bit"), folder)


def test_with_the_redirecting_patch_off_peft_refuses_wrappers(changed: Any, bare: Path) -> None:
    folder = changed("towers", target_modules=tiny.TARGETS["towers"])
    assert len(scan(folder, bare).redirected) == 20
    gemma4_compat.revert("peft-clippable-linear")
    try:
        found = scan(folder, bare)
    finally:
        gemma4_compat.install()
    assert ids(found) == ["refused"]
    assert "Gemma4ClippableLinear" in found.problems[0].message
    assert scan(folder, bare).ok


# ---------------------------------------------------------------------------------------------------------------- base


@pytest.mark.parametrize("quantization, kind", [("4bit", "4-bit"), ("4bit-double", "4-bit"), ("8bit", "8-bit")])
@pytest.mark.parametrize("stored", [False, True], ids=["asked", "stored"])
def test_a_quantized_base(workspace: Any, bare: Path, quantization: str, kind: str, stored: bool) -> None:
    model = workspace.load(quantization)
    if stored:
        model.config.save_pretrained(bare)
    found = scan(workspace.adapter("all"), bare, quantize=None if stored else quantization)
    assert ids(found) == []
    assert found.quantization == quantization
    types = Counter(
        (job.tower_of(path), type(model.get_submodule(path)).__name__)
        for path in {
            key.partition(".lora_")[0].removeprefix(PREFIX)
            for key in _saved_adapter.read(workspace.adapter("all")).tensors
        }
    )
    names = {"Linear": "", "Linear4bit": "4-bit ", "Linear8bitLt": "8-bit "}
    expected = {
        (tower, f"{'' if tower == 'text' else 'clipped '}{names[name]}linear"): count
        for (tower, name), count in types.items()
    }
    assert hits(found) == expected
    assert ("text", f"{kind} linear") in expected


def test_a_base_quantized_by_others(workspace: Any, bare: Path) -> None:
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    found = scan(workspace.adapter("language"), bare)
    assert (found.quantization, ids(found)) == ("gptq", [])
    assert "quantized with gptq" in found.notes[0]


def test_a_model_as_base_is_not_changed(workspace: Any) -> None:
    model = workspace.load(None)
    before = list(model.state_dict())
    assert scan(workspace.adapter("all"), model).ok
    assert list(model.state_dict()) == before


@pytest.mark.skipif(not HAS_UNIFIED, reason="this transformers has no gemma4_unified")
def test_the_12b(tmp_path: Path) -> None:
    model, *_ = build.on_meta("12B")
    config = peft.LoraConfig(r=8, target_modules=NAMES)
    data = json_of(config)
    found = scan(write_adapter(tmp_path, expected_shapes(config, model), data), "12B")
    assert ids(found) == []
    assert found.model_class == "Gemma4UnifiedForConditionalGeneration"
    assert set(hits(found)) == {("text", "linear")}


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"model_type": "llama"}', "is a llama model, not a Gemma 4"),
        ("{", "cannot be read"),
        (None, "there is no config.json"),
    ],
)
def test_a_base_that_is_none(workspace: Any, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(cli.app, ["scan", str(workspace.adapter("language")), str(tmp_path)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_unknown_base_and_an_unknown_quantization(workspace: Any, bare: Path) -> None:
    with pytest.raises(Gemma4CompatError, match="'E3B' is not a folder, not a variant"):
        scan(workspace.adapter("language"), "E3B")
    with pytest.raises(Gemma4CompatError, match="quantization '3bit' is unknown"):
        scan(workspace.adapter("language"), bare, quantize="3bit")


def test_the_command_as_json_is_the_scan(workspace: Any, bare: Path) -> None:
    arguments = ["scan", str(workspace.adapter("all")), str(bare), "--quantize", "8bit", "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    expected = scan(workspace.adapter("all"), bare, quantize="8bit").as_data()
    assert json.loads(result.stdout) == {
        "gemma4_compat": gemma4_compat.__version__,
        **json.loads(json.dumps(expected)),
    }


def test_the_command_says_what_is_hit(changed: Any, bare: Path) -> None:
    folder = changed("towers", lambda key: key.replace(".linear.", "."), target_modules=tiny.TARGETS["towers"])
    result = CliRunner().invoke(cli.app, ["scan", str(folder), str(bare)], terminal_width=100)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in (
        "No problems.",
        "keys 40: vision 20, audio 20",
        "on vision: 10 clipped linear audio: 10 clipped linear",
        "redirected 20 targets are clipped wrappers; their inner .linear is adapted",
        "renamed 40 keys, such as",
    ):
        assert part in text


# -------------------------------------------------------------------------------------------------------------- reader


@pytest.mark.parametrize("name", ["language", "towers", "all"])
def test_the_header_is_what_safetensors_reads(workspace: Any, name: str) -> None:
    from safetensors import safe_open

    file = workspace.adapter(name) / "adapter_model.safetensors"
    tensors = header.header(file)
    with safe_open(file, framework="pt") as opened:
        assert set(tensors) == set(opened.keys())
        for key, tensor in tensors.items():
            piece = opened.get_slice(key)
            assert (tensor.dtype, list(tensor.shape)) == (piece.get_dtype(), list(piece.get_shape()))


def test_an_adapter_in_the_cache_of_the_hub(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--someone--adapter"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    shutil.copytree(workspace.adapter("language"), repository / "snapshots" / "0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = gemma4_compat.scan_adapter("someone/adapter")
    assert found.adapter == str(repository / "snapshots" / "0123")
    assert found.ok


def test_the_readme_shows_what_is_printed(workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    command, _, shown = readme.partition("$ gemma4-compat scan ")[2].partition("```")[0].partition("\n")
    shutil.copytree(workspace.adapter("all"), tmp_path / "my-adapter")
    shutil.copytree(workspace.checkpoint, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["scan", *command.split()])
    assert done.exit_code == 0

    def same_everywhere(text: str) -> list[str]:  # the release, and how many k/v projections it has
        fixed = ("type", "keys", "weights", "ranks", "settings", "            gate", "on  ")
        return [line for line in text.strip().splitlines() if not line.startswith(fixed)]

    assert same_everywhere(done.output) == same_everywhere(shown)
    if peft.__version__ == "0.21.2" and transformers.__version__ == "5.23.0":
        assert done.output.strip().splitlines()[:6] == shown.strip().splitlines()[:6]
