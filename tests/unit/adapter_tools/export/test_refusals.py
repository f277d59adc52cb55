"""What a reader cannot have is one error that says why and what to do instead; nothing is left behind."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._adapter_tools.export import job
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._lab import tiny, tiny_adapters, tiny_models
from tests.helpers import cut_short
from tests.unit.adapter_tools.merge import adapters as made
from tests.unit.gemma4.adapters.adapter_files import lora, write_adapter

READERS = ("vllm", "sglang", "mlx", "gguf")
MERGE = "gemma4-compat merge BASE ADAPTER OUT"


def refused(adapter: Path, out: Path, target: str, base: Any, match: str) -> str:
    with pytest.raises(Gemma4CompatError, match=match) as caught:
        gemma4_compat.export_adapter(adapter, out, target, base=base)
    assert not list(out.parent.iterdir()), "something is left"
    return str(caught.value)


#: What no reader has, and the part of the message that says so.
NOWHERE: dict[str, tuple[dict[str, Any], str]] = {
    "copies": ({"modules_to_save": ["norm"]}, r"modules_to_save"),
    "rows": ({"trainable_token_indices": {"embed_tokens": [1, 2]}}, r"trainable_token_indices"),
    "biases": ({"bias": "lora_only"}, r"trained biases \(bias='lora_only'\)"),
    "own bias": ({"lora_bias": True}, r"lora_bias"),
    "init": ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights='pissa_niter_4'"),
}


@pytest.mark.parametrize("target", READERS)
@pytest.mark.parametrize("name", NOWHERE)
def test_more_than_lora(workspace: Any, tmp_path: Path, target: str, name: str) -> None:
    settings, reason = NOWHERE[name]
    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    assert MERGE in refused(adapter, out, target, workspace.checkpoint, reason)


@pytest.mark.parametrize("target", READERS)
def test_another_tuner(workspace: Any, tmp_path: Path, target: str) -> None:
    import peft

    config = peft.LoHaConfig(r=2, target_modules=made.LANGUAGE)
    adapter = made.make(workspace.checkpoint, tmp_path / "adapter", config)
    (tmp_path / "place").mkdir()
    said = refused(adapter, tmp_path / "place" / "out", target, workspace.checkpoint, "and this one is LOHA")
    assert MERGE in said


@pytest.mark.parametrize("target", ["vllm", "sglang", "gguf"])
def test_dora(workspace: Any, tmp_path: Path, target: str) -> None:
    model = tiny.load(workspace.checkpoint)
    adapter = tiny_adapters.write_adapter(model, made.LANGUAGE, tmp_path / "adapter", use_dora=True)
    (tmp_path / "place").mkdir()
    refused(adapter, tmp_path / "place" / "out", target, workspace.checkpoint, r"it is DoRA \(use_dora\)")


@pytest.mark.parametrize(
    "target, name, reason",
    [
        ("sglang", "towers", r"text layers with the same numbers \(\d+ of its modules, such as 'model.vision_tower"),
        ("sglang", "inputs", r"adapters only on q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        ("sglang", "experts", r"adapters only on q_proj, k_proj, v_proj, o_proj"),
        ("sglang", "router", r"adapters only on q_proj, k_proj, v_proj, o_proj"),
        ("gguf", "towers", r"only on the linears and experts of decoder layers"),
        ("gguf", "inputs", r"such as 'model.language_model.per_layer_model_projection'"),
    ],
)
def test_a_part_that_a_reader_lacks(adapters: Any, tmp_path: Path, target: str, name: str, reason: str) -> None:
    adapter, base = adapters(name)
    refused(adapter, tmp_path / "out", target, base, reason)


@pytest.mark.parametrize("target", READERS)
@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_the_tied_embedding(workspace: Any, tmp_path: Path, target: str, module: str) -> None:
    from safetensors.torch import load_file, save_file

    adapter = tiny_adapters.write_adapter(tiny.load(workspace.checkpoint), [module], tmp_path / "adapter")
    (tmp_path / "place").mkdir()
    refused(adapter, tmp_path / "place" / "out", target, workspace.checkpoint, "whole weights, such as")
    file = adapter / "adapter_model.safetensors"  # as with save_embedding_layers=False
    save_file({key: value for key, value in load_file(file).items() if "base_layer" not in key}, file)
    refused(adapter, tmp_path / "place" / "out", target, workspace.checkpoint, "embedding|only on")


def test_experts_of_llama_cpp_take_the_weights_of_the_base(adapters: Any, tmp_path: Path) -> None:
    from transformers import AutoConfig

    adapter, base = adapters("experts")
    config = AutoConfig.from_pretrained(base)
    config.name_or_path = ""
    refused(adapter, tmp_path / "out", "gguf", config, "per_expert_scale")
    shutil.copytree(base, tmp_path / "config only", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(Gemma4CompatError, match="no weights in safetensors"):
        gemma4_compat.export_adapter(adapter, tmp_path / "out", "gguf", base=tmp_path / "config only")


def test_the_patches_of_the_12b(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no 12B")
    base = tiny_models.build_unified_checkpoint(tmp_path / "base")
    adapter = tiny_adapters.write_adapter(tiny.load(base), ["patch_dense"], tmp_path / "adapter")
    (tmp_path / "place").mkdir()
    refused(adapter, tmp_path / "place" / "out", "vllm", base, "its vision_embedder takes no adapter")


def test_ranks_that_vllm_lacks(tmp_path: Path) -> None:
    adapter = write_adapter(
        tmp_path / "adapter",
        {
            f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight": shape
            for half, shape in (("A", (600, 1536)), ("B", (2048, 600)))
        },
        {"peft_type": "LORA", "r": 600, "lora_alpha": 8, "target_modules": ["q_proj"]},
    )
    (tmp_path / "place").mkdir()
    refused(adapter, tmp_path / "place" / "out", "vllm", "E2B", "vLLM supports ranks up to 512, this adapter has 600")


@pytest.mark.parametrize("target", [*READERS, "peft"])
def test_an_adapter_of_another_model(workspace: Any, tmp_path: Path, target: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", lora("transformer.h.0.attn.q_proj"))
    (tmp_path / "place").mkdir()
    refused(adapter, tmp_path / "place" / "out", target, workspace.checkpoint, "has no weights for Gemma4For")


@pytest.mark.parametrize("target", READERS)
@pytest.mark.parametrize(
    "shapes, reason",
    [
        (lora("model.layers.0.self_attn.q_proj", width=32), r"is \[4, 32\] instead of \[4, 64\]"),
        (lora("model.layers.0.self_attn.q_proj", rank=3), r"is \[3, 64\] instead of \[4, 64\]"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": (4, 64)}, "but not the other half"),
        ({"base_model.model.model.embed_tokens.weight": (256, 64), **lora("model.layers.0.self_attn.q_proj")},
         r"1 of its tensors are whole weights"),
        ({}, "has no weights"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(workspace: Any, tmp_path: Path, target: str, shapes: Any, reason: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", shapes)
    (tmp_path / "place").mkdir()
    refused(adapter, tmp_path / "place" / "out", target, workspace.checkpoint, reason)


def test_bad_arguments(workspace: Any, tmp_path: Path) -> None:
    adapter, base = workspace.adapter("language"), workspace.checkpoint
    (tmp_path / "place").mkdir()
    out = tmp_path / "place" / "out"
    refused(adapter, out, "tgi", base, "'tgi' is unknown; it is one of vllm, sglang, mlx, gguf, peft")
    refused(tmp_path / "none", out, "vllm", base, "does not exist")
    refused(adapter, out, "vllm", "no-such-model", "is not a folder, not a variant")
    refused(adapter, out, "vllm", None, r"not a hub id; give the base \(--base\)")
    (out / "file").mkdir(parents=True)
    with pytest.raises(Gemma4CompatError, match="nothing is overwritten"):
        gemma4_compat.export_adapter(adapter, out, "vllm", base=base)
    with pytest.raises(Gemma4CompatError, match="which is only read"):
        gemma4_compat.export_adapter(adapter, adapter / "out", "vllm", base=base)
    pickled = tmp_path / "pickled"
    shutil.copytree(adapter, pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    with pytest.raises(Gemma4CompatError, match="is a pickle"):
        gemma4_compat.export_adapter(pickled, tmp_path / "other", "vllm", base=base)


def test_the_base_is_the_id_that_the_adapter_names(tmp_path: Path) -> None:
    """Of a model that is not in the cache, the configuration of its variant counts, and that is said."""
    shapes = {
        f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight": shape
        for half, shape in (("A", (4, 1536)), ("B", (2048, 4)))
    }
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    named = {**settings, "base_model_name_or_path": "google/gemma-4-E2B-it"}
    adapter = write_adapter(tmp_path / "adapter", shapes, named)
    report = gemma4_compat.export_adapter(adapter, tmp_path / "out", "vllm")
    assert (report.base, report.modules) == ("google/gemma-4-E2B-it", 1)
    assert any("google/gemma-4-E2B-it is neither a folder nor in the cache" in note for note in report.notes)
    for path in ("/etc", "../other", "a\\b", "a/b/c", ""):
        write_adapter(tmp_path / "adapter", shapes, {**settings, "base_model_name_or_path": path})
        with pytest.raises(Gemma4CompatError, match=r"give (it|the base) \(--base\)"):
            gemma4_compat.export_adapter(adapter, tmp_path / "other", "vllm")


@pytest.mark.parametrize("target", job.TARGETS)
@pytest.mark.parametrize("what", [KeyboardInterrupt(), MemoryError(), OSError(errno.ENOSPC, "No space"), "SIGTERM"])
def test_nothing_is_left_when_it_is_cut_short(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, target: str
) -> None:
    fail = cut_short(what, tmp_path)
    monkeypatch.setattr(shards, "as_bytes", fail)
    wanted = SystemExit if isinstance(what, str) else Gemma4CompatError if isinstance(what, OSError) else type(what)
    with pytest.raises(wanted):
        gemma4_compat.export_adapter(
            workspace.adapter("language"), tmp_path / "out", target, base=workspace.checkpoint
        )
    assert not list(tmp_path.iterdir())
