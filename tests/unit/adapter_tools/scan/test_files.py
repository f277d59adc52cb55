"""Adapters by themselves: headers and configurations made up here. No torch, no weights, no pickle."""

from __future__ import annotations

import json
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._adapter_tools.scan.result import Problem, tower_of
from gemma4_compat._adapter_tools.scan.text import scan_text
from gemma4_compat._gemma4.checkpoint import header
from tests.helpers import child
from tests.unit.engine.test_import_cost import UPSTREAM
from tests.unit.gemma4.adapters.adapter_files import LORA, PREFIX, as_in_the_forum_thread, lora, write_adapter

TEXT = "model.language_model.layers.{}.self_attn.q_proj"


def header_bytes(entries: Any) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


# ------------------------------------------------------------------------------------------------------------ the file


def test_the_adapter_of_the_forum_thread_is_counted_as_its_probe_did(tmp_path: Path) -> None:
    found = gemma4_compat.scan_adapter(write_adapter(tmp_path, as_in_the_forum_thread(), LORA))
    assert found.keys == {"text": 490, "vision": 224, "audio": 72}
    assert found.ranks == {4: 393}
    assert found.dtypes == {"F32": 786}
    assert found.nbytes == 786 * 4 * 64 * 4
    assert found.saved_from == "Gemma4ForConditionalGeneration"
    assert found.ok
    assert (found.base, found.hits, found.remapped, found.dead) == (None, (), {}, ())


def test_nothing_upstream_is_imported_without_a_base(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, lora(TEXT.format(0)))
    script = f"import gemma4_compat, json, sys; gemma4_compat.scan_adapter({str(folder)!r})"
    script += "; print(json.dumps([*sys.modules]))"
    done = child("-c", script)
    loaded = {name.partition(".")[0] for name in done.data}
    assert "gemma4_compat" in loaded
    assert not loaded & set(UPSTREAM)


def test_a_terabyte_of_weights_is_not_read(tmp_path: Path) -> None:
    """A hole in a file: reading it would take minutes and the memory of this process."""
    shapes = {f"{PREFIX}{TEXT.format(0)}.lora_{half}.weight": (1 << 18, 1 << 18) for half in "AB"}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = gemma4_compat.scan_adapter(write_adapter(tmp_path, shapes, LORA | {"r": 1 << 18}))
    assert found.nbytes == 2 * 4 << 36
    assert found.ok
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


def test_only_the_header_and_the_configuration_are_opened_and_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, lora(*(TEXT.format(layer) for layer in range(40)), width=4096))
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04")
    script = f"""
import json, sys
opened = []
sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)
import gemma4_compat
gemma4_compat.scan_adapter({str(folder)!r})
files = [name for name in opened if name.startswith({str(tmp_path)!r})]
print(json.dumps([files, [name for name in sys.modules if "pickle" in name]]))
"""
    opened, pickles = child("-c", script).data
    assert {Path(name).name for name in opened} == {"adapter_config.json", "adapter_model.safetensors"}
    assert pickles == []


@pytest.mark.parametrize(
    "path, tower",
    [
        ("model.language_model.layers.3.mlp.up_proj", "text"),
        ("model.layers.3.experts", "text"),
        ("layers.3.mlp.up_proj", "text"),
        ("model.language_model.per_layer_model_projection", "text"),
        ("model.vision_tower.encoder.layers.1.mlp.up_proj.linear", "vision"),
        ("vision_tower.patch_embedder.input_proj", "vision"),
        ("model.audio_tower.layers.0.lconv1d.linear_start.linear", "audio"),
        ("model.embed_vision.embedding_projection", "embedders"),
        ("model.embed_audio.embedding_projection", "embedders"),
        ("model.language_model.embed_tokens_per_layer", "embeddings"),
        ("model.embed_tokens", "embeddings"),
        ("lm_head", "embeddings"),
        ("prompt_embeddings", "other"),
    ],
)
def test_towers(path: str, tower: str) -> None:
    assert tower_of(path) == tower


@pytest.mark.parametrize(
    "module, saved_from",
    [
        ("model.language_model.layers.0.self_attn.q_proj", "Gemma4ForConditionalGeneration"),
        ("model.vision_tower.encoder.layers.0.mlp.up_proj.linear", "Gemma4ForConditionalGeneration"),
        ("model.layers.0.self_attn.q_proj", "Gemma4ForCausalLM"),
        ("language_model.layers.0.self_attn.q_proj", "Gemma4Model"),
        ("layers.0.self_attn.q_proj", "Gemma4TextModel"),
        ("language_model.model.layers.0.self_attn.q_proj", "a multimodal class of the old layout"),
        ("transformer.h.0.attn", "unknown"),
    ],
)
@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_the_class_is_told_by_the_names(tmp_path: Path, module: str, saved_from: str, prefix: str) -> None:
    found = gemma4_compat.scan_adapter(write_adapter(tmp_path, lora(module, prefix=prefix)))
    assert found.saved_from.startswith(saved_from)


def test_the_tool_is_told_by_the_configuration(tmp_path: Path) -> None:
    config = LORA | {"peft_version": "0.19.1", "auto_mapping": {"unsloth_fixed": True}}
    assert (
        gemma4_compat.scan_adapter(write_adapter(tmp_path, lora("layers.0"), config)).saved_by
        == "Unsloth, PEFT 0.19.1"
    )


def test_settings_that_change_something_are_told(tmp_path: Path) -> None:
    config = LORA | {
        "use_dora": True,
        "use_rslora": False,
        "modules_to_save": ["lm_head"],
        "trainable_token_indices": [3, 4],
        "target_parameters": ["experts.down_proj"],
        "rank_pattern": {},
        "inference_mode": True,
    }
    found = gemma4_compat.scan_adapter(write_adapter(tmp_path, lora(TEXT.format(0)), config))
    assert found.settings == {
        "r": 4,
        "lora_alpha": 8,
        "use_dora": True,
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.down_proj"],
        "modules_to_save": ["lm_head"],
        "trainable_token_indices": [3, 4],
    }


# ------------------------------------------------------------------------------------------------------------ problems


def problems(*arguments: Any, **options: Any) -> dict[str, Problem]:
    found = gemma4_compat.scan_adapter(write_adapter(*arguments, **options))
    assert found.ok is (not found.problems)
    return {problem.id: problem for problem in found.problems}


def test_ranks_and_their_patterns(tmp_path: Path) -> None:
    towers = "model.vision_tower.encoder.layers.0.mlp.up_proj.linear"
    shapes = lora(TEXT.format(0), TEXT.format(1)) | lora(TEXT.format(2), towers, rank=16)
    config = LORA | {"rank_pattern": {r"layers\.2\.self_attn\.q_proj": 16, "up_proj": 16}}
    assert problems(tmp_path, shapes, config) == {}
    assert gemma4_compat.scan_adapter(tmp_path).ranks == {4: 2, 16: 2}
    problem = problems(tmp_path, shapes)["rank"]
    assert len(problem.keys) == 2
    assert "2 LoRA weights have a rank that differs from adapter_config.json" in problem.message
    assert "[16, 64]" in problem.message


def test_halves_of_different_rank(tmp_path: Path) -> None:
    shapes = lora(TEXT.format(0))
    shapes[f"{PREFIX}{TEXT.format(0)}.lora_B.weight"] = (64, 8)
    assert problems(tmp_path, shapes)["rank"].keys == (f"{PREFIX}{TEXT.format(0)}.lora_B.weight",)


def test_experts_have_the_ranks_of_all_in_one(tmp_path: Path) -> None:
    experts = "model.language_model.layers.0.experts"
    shapes = lora(experts, f"{experts}.base_layer", rank=4 * 128)
    config = LORA | {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    assert problems(tmp_path, shapes, config) == {}
    assert gemma4_compat.scan_adapter(tmp_path).ranks == {4: 2}
    assert set(problems(tmp_path, shapes)) == {"rank"}


def test_a_layer_with_half_of_its_weights(tmp_path: Path) -> None:
    shapes = lora(TEXT.format(0), TEXT.format(1))
    lost = f"{PREFIX}{TEXT.format(1)}.lora_B.weight"
    del shapes[lost]
    assert problems(tmp_path, shapes)["half"].keys == (f"{PREFIX}{TEXT.format(1)}.lora_A.weight",)


def test_weights_saved_in_pieces(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"{PREFIX}{TEXT.format(0)}.lora_{half}.weight": (0,) for half in "AB"}
    assert "ZeRO-3" in problems(tmp_path, shapes)["flat"].message


def test_no_weights_at_all(tmp_path: Path) -> None:
    assert set(problems(tmp_path, {})) == {"empty"}


# ----------------------------------------------------------------------------------------------------------- bad input


def refusal(adapter: Any) -> str:
    """The message, which is also the command line's one line on stderr, with exit code 2."""
    with pytest.raises(Gemma4CompatError) as caught:
        gemma4_compat.scan_adapter(adapter)
    result = CliRunner().invoke(cli.app, ["scan", str(adapter)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"gemma4-compat: {caught.value}\n"
    assert len(result.stderr.splitlines()) == 1
    return str(caught.value)


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    assert f"{str(tmp_path / 'nowhere')!r} does not exist" in refusal(tmp_path / "nowhere")
    assert "'nowhere' does not exist" in refusal("nowhere")


def test_an_id_that_is_not_cached_comes_with_the_command_that_fetches_it() -> None:
    assert "hf download nobody/nothing adapter_config.json adapter_model.safetensors" in refusal("nobody/nothing")


def test_a_file_instead_of_its_folder(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora(TEXT.format(0)))
    assert "give the folder that it is in" in refusal(tmp_path / "adapter_model.safetensors")


def test_a_folder_that_holds_none_or_several(tmp_path: Path) -> None:
    assert "is not a saved adapter: there is no adapter_config.json in it" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "the folder of a model, which comes after the adapter" in refusal(tmp_path)
    write_adapter(tmp_path / "checkpoint-20", lora(TEXT.format(0)))
    write_adapter(tmp_path / "checkpoint-10", lora(TEXT.format(0)))
    assert "holds some: checkpoint-10, checkpoint-20" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_weights_without_a_configuration(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert f"there is {name} in {str(tmp_path)!r} but no adapter_config.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[]", "it is a JSON list"),
        ("{}", "has no peft_type"),
        ('{"lora_parameters": {}, "fine_tune_type": "lora"}', "looks like one of mlx-lm"),
        ('{"peft_type": "TELEPATHY"}', "the peft_type 'TELEPATHY'"),
        ('{"peft_type": ["LORA"]}', r"the peft_type ['LORA']"),
        ('{"peft_type": "LORA", "r": 4, "rank_pattern": {"(": 2}}', "is not a valid regular expression"),
        ('{"peft_type": "LORA", "r": 4, "rank_pattern": [1]}', "rank_pattern: expected object | null, got array"),
        ('{"peft_type": "LORA", "r": "4"}', "r: expected int | null, got str"),
        ('{"peft_type": "LORA", "r": 0}', "they must be a positive number"),
        ("\udcff", "is not JSON"),
    ],
)
def test_a_configuration_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    write_adapter(tmp_path, lora(TEXT.format(0)))
    (tmp_path / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert message in refusal(tmp_path)


def test_a_pickle_is_refused_and_not_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.write_text, (tmp_path / "exploded", "x"))

    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA))
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    message = refusal(tmp_path)
    assert "is a pickle, which runs code when it is read, so it is not read" in message
    assert "save_pretrained()" in message
    assert not (tmp_path / "exploded").exists()


def test_weights_under_other_names(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA))
    assert "there is no adapter_model.safetensors in it" in refusal(tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    assert "there is adapters.safetensors, which PEFT does not look for" in refusal(tmp_path)
    (tmp_path / "adapter_model.safetensors.index.json").write_text("{}")
    assert "in several files" in refusal(tmp_path)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not a safetensors file: it is empty"),
        (b"1234567", "is not a safetensors file: it starts with b'1234567'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"PK\x03\x04" + bytes(60), "is a pickle"),
        (b"\x80\x02}q\x00(" + bytes(60), "is a pickle"),
        ((1000).to_bytes(8, "little") + b"{}", "is truncated: it has 10 bytes and its header alone takes 1008"),
        (header_bytes({"a": entry()}) + bytes(10), "is truncated"),
        (header_bytes({"a": entry()}) + bytes(17), "is damaged"),
        (header_bytes(b"{"), "its header cannot be read"),
        (header_bytes([1]), "is not a safetensors file"),
        (header_bytes({"a": 1}), "its header cannot be read"),
        (header_bytes({"a": entry(shape=[2, "2"])}) + bytes(16), "its header cannot be read"),
        (header_bytes({"a": entry(shape=[-2, -2])}) + bytes(16), "its header cannot be read"),
        (header_bytes({"a": entry(shape=[2, 3])}) + bytes(16), r"F32 of shape [2, 3] in 16 bytes"),
        (header_bytes({"a": entry(data_offsets=[16, 0])}), "its header cannot be read"),
        (header_bytes({"a": entry(data_offsets=[0])}), "its header cannot be read"),
        (header_bytes({"a": {"shape": []}}), "its header cannot be read"),
    ],
)
def test_weights_that_are_not_safetensors_or_not_all_of_it(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(LORA))
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    assert message in refusal(tmp_path)


def test_a_download_that_stopped_anywhere_is_truncated(tmp_path: Path) -> None:
    file = write_adapter(tmp_path, lora(TEXT.format(0))) / "adapter_model.safetensors"
    content = file.read_bytes()
    for length in range(0, len(content), 7):
        file.write_bytes(content[:length])
        with pytest.raises(Gemma4CompatError, match="truncated" if length >= 8 else "not a safetensors file"):
            header.header(file)


def test_quantize_without_a_base_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, lora(TEXT.format(0)))
    result = CliRunner().invoke(cli.app, ["scan", str(folder), "--quantize", "4bit"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "give the base as well" in result.stderr


# ---------------------------------------------------------------------------------------------------- the command line


def test_the_command_says_all_of_it(tmp_path: Path) -> None:
    write_adapter(tmp_path, as_in_the_forum_thread(), LORA | {"base_model_name_or_path": "google/gemma-4-E2B-it"})
    result = CliRunner().invoke(cli.app, ["scan", str(tmp_path)])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "No problems."
    for line in ("keys        786: text 490, vision 224, audio 72", "ranks       4 in 393 layers"):
        assert line in lines
    assert "it was trained on google/gemma-4-E2B-it" in result.stdout


def test_the_command_says_problems_first_and_exits_1(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora(TEXT.format(0), rank=8))
    result = CliRunner().invoke(cli.app, ["scan", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0] == "1 problem:"
    assert result.stdout.splitlines()[1].startswith("  - rank: 1 LoRA weights have a rank that differs")


def test_the_json_has_every_attribute_by_its_name(tmp_path: Path) -> None:
    write_adapter(tmp_path, lora(TEXT.format(0), rank=8), dtype="BF16")
    result = CliRunner().invoke(cli.app, ["scan", str(tmp_path), "--json"])
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    message = data["problems"][0].pop("message")
    assert message.startswith("1 LoRA weights")
    assert data == {
        "schema": 1,
        "gemma4_compat": gemma4_compat.__version__,
        "ok": False,
        "adapter": str(tmp_path),
        "base": None,
        "model_class": None,
        "quantization": None,
        "problems": [{"id": "rank", "keys": [f"{PREFIX}{TEXT.format(0)}.lora_A.weight"]}],
        "notes": [],
        "peft_type": "LORA",
        "settings": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
        "saved_from": "Gemma4ForConditionalGeneration",
        "saved_by": "PEFT",
        "keys": {"text": 2},
        "dtypes": {"BF16": 2},
        "nbytes": 2 * 8 * 64 * 2,
        "ranks": {"8": 1},
        "hits": [],
        "redirected": [],
        "remapped": {},
        "dead": [],
    }


@pytest.mark.parametrize("width", [50, 80, 100])
def test_lines_are_as_wide_as_they_may_be(tmp_path: Path, width: int) -> None:
    names = [TEXT.format(layer) for layer in range(35)]
    found = gemma4_compat.scan_adapter(write_adapter(tmp_path, lora(*names, rank=8), LORA | {"target_modules": names}))
    text = scan_text(found, width=width)
    assert all(len(line) <= width or len(line.split()) <= 2 for line in text.splitlines())
    assert "35 that end in q_proj" in " ".join(text.split())
