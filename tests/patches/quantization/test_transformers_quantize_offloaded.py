"""F32: modules that a device map offloads, quantized when asked, and said which are either way."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.io.text import scaled_text
from gemma4_compat._gemma4.quantization import offloaded, opt_in
from gemma4_compat._gemma4.quantization.bytes import stored_bytes
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization.transformers_quantize_offloaded import PATCH, quantize
from tests.patches.promise import Promise

LAYERS = "model.language_model.layers"
QUANTIZED = {"4bit": "Linear4bit", "4bit-double": "Linear4bit", "8bit": "Linear8bitLt"}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"logits differ by"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The lines that were logged since the last call."""
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):

        def taken() -> list[str]:
            found = [record.getMessage() for record in caplog.records if record.name == "gemma4_compat"]
            caplog.clear()
            return found

        yield taken


def a_map(workspace: Any, offload: str = "both") -> dict[str, Any]:
    return tiny.device_map(workspace.load(), offload, main=workspace.main, offloaded=workspace.offloaded)


def load(workspace: Any, placement: dict[str, Any], folder: Path, quantization: str = "4bit", **kwargs: Any) -> Any:
    return tiny.load(
        workspace.checkpoint, quantization, device_map=placement, offload_folder=str(folder / "offload"), **kwargs
    )


def without_the_flag(quantization: str) -> Any:
    config = tiny.quantization_config(quantization, cpu_offload=False)
    assert not config.llm_int8_enable_fp32_cpu_offload
    return config


def kind(model: Any, name: str) -> str:
    return type(model.get_submodule(name)).__name__


@pytest.mark.parametrize("quantization", list(QUANTIZED))
def test_answers_are_those_of_one_device_and_the_flag_is_not_needed(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, quantization: str
) -> None:
    from transformers import Gemma4ForConditionalGeneration

    with gemma4_compat.quantize(offloaded=True):
        model = Gemma4ForConditionalGeneration.from_pretrained(
            workspace.checkpoint,
            dtype="bfloat16",
            device_map=a_map(workspace),
            quantization_config=without_the_flag(quantization),
            offload_folder=tmp_path,
        ).eval()
    weight = model.get_submodule(f"{LAYERS}.2.mlp.up_proj").weight
    assert kind(model, f"{LAYERS}.2.mlp.up_proj") == QUANTIZED[quantization]
    assert weight.device.type == "meta"
    assert kind(model, "lm_head") == "Linear"
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", list(QUANTIZED))
def test_weights_kept_in_host_memory(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, quantization: str
) -> None:
    import torch

    # To accelerate only the string means offloaded: this CPU is a device to compute on, as a GPU is.
    main = torch.device("cpu") if workspace.main == "cpu" else workspace.main
    placement = tiny.device_map(workspace.load(), "both", main=main, offloaded="cpu")
    with gemma4_compat.quantize(offloaded=True):
        model = load(workspace, placement, tmp_path, quantization)
    name = f"{LAYERS}.2.mlp.up_proj"
    assert kind(model, name) == QUANTIZED[quantization]
    assert model.get_submodule(name).weight.device.type == "meta"
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("device, expected", [("cpu", "meta"), (0, "cpu"), ("meta", "cpu")])
def test_quantized_on_the_accelerator_and_kept_on_the_host(device: Any, expected: str) -> None:
    import torch

    # meta is the accelerator here; what is not offloaded is on its device before it comes to be quantized.
    quantizer = SimpleNamespace(_gemma4_compat_placement={"": "meta", "layer": device})
    seen: list[str] = []

    def original(_self: Any, inputs: dict[str, Any], **_kwargs: Any) -> dict[str, Any]:
        (value,) = inputs["layer.weight"]
        seen.append(value.device.type)
        return {"layer.weight": torch.zeros(2)}

    arguments = {"layer.weight": [torch.ones(2)]}
    found = quantize(original, SimpleNamespace(hf_quantizer=quantizer), arguments, model=None)
    assert seen == [expected]
    assert found["layer.weight"].device.type == "cpu"
    assert arguments["layer.weight"][0].device.type == "cpu", "the caller's own is not changed"


def test_the_environment_asks_for_the_whole_process(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", f"another-patch, {PATCH.id}")
    model = load(workspace, a_map(workspace), tmp_path)
    assert difference(one_device("4bit", None), workspace.outputs(model)) == 0.0


def test_unasked_nothing_changes(workspace: Any, tmp_path: Path) -> None:
    from transformers import Gemma4ForConditionalGeneration

    model = load(workspace, a_map(workspace), tmp_path)
    assert kind(model, f"{LAYERS}.2.mlp.up_proj") == "Linear"
    if workspace.main != "cpu":  # to upstream's skip list the CPU is offloaded, also where it is the main device
        assert kind(model, f"{LAYERS}.1.mlp.up_proj") == "Linear4bit"
    with pytest.raises(ValueError, match="llm_int8_enable_fp32_cpu_offload=True"):
        Gemma4ForConditionalGeneration.from_pretrained(
            workspace.checkpoint,
            device_map=a_map(workspace),
            quantization_config=without_the_flag("4bit"),
            offload_folder=tmp_path,
        )


def test_contexts_nest_and_belong_to_their_thread() -> None:
    seen: list[bool] = []
    with gemma4_compat.quantize(offloaded=True):
        with contextlib.suppress(KeyError), gemma4_compat.quantize(offloaded=True):
            raise KeyError
        assert opt_in.OFFLOADED.is_enabled()
        thread = threading.Thread(target=lambda: seen.append(opt_in.OFFLOADED.is_enabled()))
        thread.start()
        thread.join()
    assert seen == [False]
    assert not opt_in.OFFLOADED.is_enabled()


def test_undone_it_says_so_and_changes_nothing(workspace: Any, tmp_path: Path) -> None:
    gemma4_compat.revert(PATCH.id)
    try:
        with pytest.raises(Gemma4CompatError, match="which is reverted"), gemma4_compat.quantize(offloaded=True):
            pass
        with opt_in.OFFLOADED.enabled():
            model = load(workspace, a_map(workspace), tmp_path)
        assert kind(model, f"{LAYERS}.2.mlp.up_proj") == "Linear"
    finally:
        gemma4_compat.install()


def test_modules_that_the_user_skips_stay_as_they_are(workspace: Any, tmp_path: Path) -> None:
    skipped = f"{LAYERS}.2.mlp"
    with gemma4_compat.quantize(offloaded=True):
        model = load(workspace, a_map(workspace), tmp_path, skip_modules=[skipped])
    reference = tiny.load(workspace.checkpoint, "4bit", device=workspace.main, skip_modules=[skipped])
    assert kind(model, f"{skipped}.up_proj") == "Linear"
    assert kind(model, f"{LAYERS}.2.self_attn.q_proj") == "Linear4bit"
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


def test_an_entry_for_layer_1_or_for_everything_takes_no_other_layer(workspace: Any, tmp_path: Path) -> None:
    checkpoint = tiny_models.build_checkpoint(tmp_path / "twelve", layers=12)
    reference = workspace.outputs(tiny.load(checkpoint, "4bit", device=workspace.main))
    maps: list[dict[str, Any]] = [
        {"": workspace.main, f"{LAYERS}.1": workspace.offloaded},
        # What "" offloads is everything that has no entry of its own, and to upstream's skip list it is everything.
        {"": workspace.offloaded, f"{LAYERS}.1": workspace.main, "lm_head": workspace.main},
    ]
    for number, placement in enumerate(maps):
        with gemma4_compat.quantize(offloaded=True):
            folder = str(tmp_path / str(number))
            model = tiny.load(checkpoint, "4bit", device_map=placement, offload_folder=folder)
        names = [name for name, _ in model.named_modules() if name.endswith("proj") and LAYERS in name]
        assert {kind(model, name) for name in names if "per_layer" not in name} == {"Linear4bit"}
        assert difference(reference, workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", list(QUANTIZED))
def test_saved_and_loaded_again(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, quantization: str
) -> None:
    from transformers import Gemma4ForConditionalGeneration

    with gemma4_compat.quantize(offloaded=True):
        model = load(workspace, a_map(workspace), tmp_path, quantization)
        model.save_pretrained(tmp_path / "saved")
        for name, placement in (("whole", {"": workspace.main}), ("split", a_map(workspace))):
            again = Gemma4ForConditionalGeneration.from_pretrained(
                tmp_path / "saved", device_map=placement, offload_folder=tmp_path / name
            ).eval()
            assert kind(again, f"{LAYERS}.2.mlp.up_proj") == QUANTIZED[quantization]
            assert difference(one_device(quantization, None), workspace.outputs(again)) == 0.0, name


def test_with_an_adapter(workspace: Any, one_device: Callable[..., Any], tmp_path: Path) -> None:
    from peft import PeftModel

    with gemma4_compat.quantize(offloaded=True):
        model = load(workspace, a_map(workspace), tmp_path, "4bit-double")
    model = PeftModel.from_pretrained(model, workspace.adapter("language"))
    assert difference(one_device("4bit-double", "language"), workspace.outputs(model)) == 0.0


def test_without_a_folder_for_the_disk_one_error_says_what_to_do(workspace: Any) -> None:
    placement = {**a_map(workspace, "none"), f"{LAYERS}.2": "disk"}
    with (
        gemma4_compat.quantize(offloaded=True),
        pytest.raises(Gemma4CompatError, match=rf"{LAYERS}\.2.*on disk.*offload_folder"),
    ):
        tiny.load(workspace.checkpoint, "4bit", device_map=placement)


def test_the_unified_model(workspace: Any, tmp_path: Path) -> None:
    import torch

    pytest.importorskip("transformers.models.gemma4_unified", reason="transformers 5.10 and newer have it")
    from transformers import Gemma4UnifiedForCausalLM

    tiny_models.unified_text_model().save_pretrained(tmp_path / "unified")
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    found = []
    for placement in ({"": workspace.main}, {"": workspace.main, "model.layers.1": workspace.offloaded}):
        with gemma4_compat.quantize(offloaded=True):
            model = Gemma4UnifiedForCausalLM.from_pretrained(
                tmp_path / "unified",
                dtype=torch.bfloat16,
                device_map=placement,
                quantization_config=without_the_flag("4bit-double"),
                offload_folder=tmp_path / "offload",
            ).eval()
        assert kind(model, "model.layers.1.mlp.up_proj") == "Linear4bit"
        with torch.no_grad():
            found.append([model(input_ids=ids).logits for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_a_model_of_another_family_is_left_alone(
    workspace: Any, tmp_path: Path, lines: Callable[[], list[str]]
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "llama")

    def llama(quantization: Any) -> Any:
        return LlamaForCausalLM.from_pretrained(
            tmp_path / "llama",
            device_map={"": workspace.main, "model.layers.1": workspace.offloaded},
            quantization_config=quantization,
            offload_folder=tmp_path / "offload",
        )

    with gemma4_compat.quantize(offloaded=True):
        with pytest.raises(ValueError, match="llm_int8_enable_fp32_cpu_offload=True"):
            llama(without_the_flag("4bit"))
        model = llama(tiny.quantization_config("4bit", cpu_offload=True))
    assert kind(model, "model.layers.1.mlp.up_proj") == "Linear"
    assert kind(model, "model.layers.0.mlp.up_proj") == ("Linear" if workspace.main == "cpu" else "Linear4bit")
    assert not lines()


@pytest.mark.parametrize("quantization, precision", [("4bit", "4-bit"), ("8bit", "8-bit")])
def test_one_line_says_what_is_quantized(
    workspace: Any, tmp_path: Path, lines: Callable[[], list[str]], quantization: str, precision: str
) -> None:
    placement = a_map(workspace, "layers") | {"model.language_model.embed_tokens_per_layer": workspace.offloaded}
    where = "on disk" if workspace.main == "cpu" else "off the accelerator"
    with gemma4_compat.quantize(offloaded=True):
        model = load(workspace, placement, tmp_path, quantization)
    (line,) = lines()
    assert line.startswith(f"gemma4_compat: {where}: {precision} ")
    assert f"({LAYERS}.0,2,5)" in line
    assert "bf16 " in line
    assert "(model.language_model.embed_tokens_per_layer)" in line
    assert "quantize(offloaded=True)" not in line, "nothing more can be quantized"
    layers = [model.get_submodule(f"{LAYERS}.{index}") for index in (0, 2, 5)]
    total = sum(
        stored_bytes(weight)
        for layer in layers
        for weight in layer.parameters()
        if offloaded.precision(weight) == precision
    )
    assert f"{precision} {scaled_text(total, base=1024, digits=2)} " in line
    load(workspace, placement, tmp_path, quantization)
    (line,) = lines()
    assert precision not in line
    assert f"{LAYERS}.0,2,5" in line
    assert "load inside gemma4_compat.quantize(offloaded=True)" in line


def test_no_line_where_there_is_nothing_to_say(workspace: Any, tmp_path: Path, lines: Callable[[], list[str]]) -> None:
    load(workspace, {"": workspace.main}, tmp_path)
    tiny.load(workspace.checkpoint, device_map=a_map(workspace), offload_folder=str(tmp_path))
    assert not lines()


@pytest.mark.parametrize(
    "names, expected",
    [
        (["a.0", "a.1", "a.2", "a.4"], ["a.0-2,4"]),
        (["tower", "b.3", "a.0"], ["b.3", "a.0", "tower"]),
        ([], []),
    ],
)
def test_runs_of_layers_are_joined(names: list[str], expected: list[str]) -> None:
    assert offloaded.compact(names) == expected


@pytest.mark.parametrize(
    "name, block",
    [
        (f"{LAYERS}.3.mlp.up_proj.weight", f"{LAYERS}.3"),
        (f"{LAYERS}.4.mlp.up_proj.weight", f"{LAYERS}.4.mlp"),
        ("model.vision_tower.encoder.layers.1.mlp.weight", "model.vision_tower"),
        ("model.language_model.embed_tokens_per_layer.weight", "model.language_model.embed_tokens_per_layer"),
        ("model.embed_audio.embedding_projection.weight", "model.embed_audio"),
        ("model.layers.7.mlp.up_proj.weight", "model.layers.7"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_the_part_of_the_model_that_is_named(name: str, block: str) -> None:
    assert offloaded._block(name, {"": "cpu", f"{LAYERS}.4.mlp": "cpu"}) == block
