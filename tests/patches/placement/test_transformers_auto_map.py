"""F17: ``device_map="auto"`` and its kin with less memory than the model needs."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.io.text import size_text
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat._memory import layout
from gemma4_compat._memory.blueprint import describe
from gemma4_compat._memory.formulas import Load
from gemma4_compat.patches.placement.transformers_auto_map import PATCH
from tests.patches.promise import Promise

LAYERS = "model.language_model.layers"
TABLE = "model.language_model.embed_tokens_per_layer"
MIB = 1 << 20
QUANTIZED = {None: "Linear", "4bit-double": "Linear4bit", "8bit": "Linear8bitLt"}
CONTEXT = 256  # the tiny model's longest


class TestPromise(Promise):
    patch_id = PATCH.id
    original = (
        r"offload the whole model to the disk|on the expected device|Cannot copy out of meta|"
        r"Some modules are dispatched|decoder layers are on"
    )


@pytest.fixture(scope="module")
def checkpoint(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose per-layer table is larger than the rest of it."""
    return tiny_models.build_checkpoint(tmp_path_factory.mktemp("large-table"), per_layer_vocabulary=1 << 16)


@pytest.fixture(scope="module")
def on_meta(workspace: Any) -> Any:
    import torch
    from transformers import Gemma4ForConditionalGeneration

    with torch.device("meta"):
        return Gemma4ForConditionalGeneration(tiny_configs.config(per_layer_vocabulary=1 << 16)).to(torch.bfloat16)


def without_the_flag(quantization: str | None) -> Any:
    return tiny.quantization_config(quantization, cpu_offload=False)


def load(checkpoint: Path, quantization: str | None, folder: Path, **kwargs: Any) -> Any:
    from transformers import Gemma4ForConditionalGeneration

    return Gemma4ForConditionalGeneration.from_pretrained(
        checkpoint,
        dtype="bfloat16",
        quantization_config=without_the_flag(quantization),
        offload_folder=folder,
        **kwargs,
    ).eval()


def a_map(model: Any, strategy: str, max_memory: Any) -> dict[str, Any]:
    from transformers.integrations.accelerate import _get_device_map

    placement: dict[str, Any] = _get_device_map(model, strategy, max_memory, None)
    return placement


@pytest.mark.parametrize(
    "quantization, strategy",
    [(None, "balanced"), ("4bit-double", "auto"), ("4bit-double", "sequential"), ("8bit", "balanced_low_0")],
)
def test_the_smallest_budget_loads_and_answers_like_one_device(
    workspace: Any,
    checkpoint: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    quantization: str | None,
    strategy: str,
) -> None:
    reference = tiny.load(checkpoint, quantization, device=workspace.main)
    budget = layout.smallest_budget(describe(reference), Load(context=CONTEXT))
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
        model = load(checkpoint, quantization, tmp_path, device_map=strategy, max_memory={workspace.main: budget})
    placement = model.hf_device_map
    assert placement[TABLE] == workspace.offloaded
    offloaded = [index for index in range(6) if placement[f"{LAYERS}.{index}"] == workspace.offloaded]
    assert len(offloaded) >= 2
    name = f"{LAYERS}.{offloaded[0]}.mlp.up_proj"
    assert type(model.get_submodule(name)).__name__ == QUANTIZED[quantization]
    assert model.get_submodule(name).weight.device.type == "meta"
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0
    said = [record.getMessage() for record in caplog.records if "device_map=" in record.getMessage()]
    assert len(said) == 1
    assert repr(strategy) in said[0]
    assert TABLE in said[0]
    assert f"room for {CONTEXT} tokens of context (text)" in said[0]


def test_a_budget_for_weights_alone_is_filled_and_the_line_says_so(
    workspace: Any, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = tiny.load(checkpoint, device=workspace.main)
    least = layout.smallest_budget(describe(reference), Load(context=CONTEXT, weights_only=True))
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
        model = load(checkpoint, None, tmp_path, device_map="auto", max_memory={workspace.main: least})
    assert model.hf_device_map[TABLE] == workspace.offloaded
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0
    said = [record.getMessage() for record in caplog.records if "device_map=" in record.getMessage()]
    assert len(said) == 1
    needed = layout.smallest_budget(describe(reference), Load(context=CONTEXT))
    assert f"room for only the weights; room for {CONTEXT} tokens of context (text) would need" in said[0]
    assert size_text(needed, up=True) in said[0]


def test_a_budget_below_every_plan_gets_upstreams_map_and_one_line(
    on_meta: Any, caplog: pytest.LogCaptureFixture
) -> None:
    least = layout.smallest_budget(describe(on_meta), Load(context=CONTEXT, weights_only=True))
    budget = {0: least - 1, "cpu": "1GiB"}
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
        found = a_map(on_meta, "auto", budget)
    gemma4_compat.revert(PATCH.id)
    try:
        assert found == device_maps.with_buffers(on_meta, a_map(on_meta, "auto", budget))
    finally:
        gemma4_compat.install()
    said = [record.getMessage() for record in caplog.records if "device_map=" in record.getMessage()]
    assert len(said) == 1
    assert "does not fit into" in said[0]
    assert "Upstream's map is used instead; kept elsewhere: " in said[0]


def test_where_upstream_refuses_its_map_too_the_error_names_the_smallest_budget(
    workspace: Any, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(Gemma4CompatError, match="does not fit into 98 KiB") as error:
        load(checkpoint, "4bit", tmp_path, device_map="auto", max_memory={workspace.main: 100_000})
    found = re.search(r"([\d.]+ [KMG]iB) on one accelerator", str(error.value))
    assert found
    named = found.group(1).replace(" ", "")
    model = load(checkpoint, "4bit", tmp_path, device_map="auto", max_memory={workspace.main: named})
    assert model.hf_device_map[TABLE] == workspace.offloaded


@pytest.mark.parametrize("strategy", ["auto", "sequential", "balanced", "balanced_low_0"])
@pytest.mark.parametrize("memory", [{0: "60MiB", "cpu": "1GiB"}, {0: "40MiB", 1: "60MiB", "cpu": "1GiB"}])
def test_what_fits_is_placed_by_upstream(on_meta: Any, strategy: str, memory: dict[Any, Any]) -> None:
    found = a_map(on_meta, strategy, dict(memory))
    gemma4_compat.revert(PATCH.id)
    try:
        upstream = a_map(on_meta, strategy, dict(memory))
    finally:
        gemma4_compat.install()
    if not {"cpu", "disk"} & set(upstream.values()):
        assert found == upstream
    else:
        assert found[TABLE] == "cpu"
        assert not {"cpu", "disk"} & {found[f"{LAYERS}.{index}"] for index in range(6)}


def test_the_table_goes_to_the_cpu_then_to_disk_and_the_layers_stay(
    on_meta: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory = {0: "44MiB", "cpu": "1GiB"}
    found = a_map(on_meta, "auto", memory)
    assert {name for name, device in found.items() if device == "cpu"} == {TABLE}
    assert next(iter(found.values())) == 0
    assert memory == {0: "44MiB", "cpu": "1GiB"} or memory == {0: 44 * MIB, "cpu": 1 << 30}  # accelerate may parse it
    assert a_map(on_meta, "auto", {0: "44MiB"})[TABLE] == "cpu", "nobody forbade the CPU"
    assert a_map(on_meta, "auto", {0: "44MiB", "cpu": "1MiB"})[TABLE] == "disk"
    caplog.clear()
    assert a_map(on_meta, "auto", {0: "44MiB", "cpu": "1MiB", "disk": "1MiB"})[TABLE] == "disk", "as upstream has it"
    assert re.search(r"; \d+ MiB are on disk, more than 1 MiB$", caplog.messages[-1])


def test_a_second_accelerator_is_used_before_the_cpu(on_meta: Any) -> None:
    found = a_map(on_meta, "auto", {0: "44MiB", 1: "44MiB", "cpu": "1GiB"})
    assert {name for name, device in found.items() if device == "cpu"} <= {TABLE}


def test_the_unified_model_has_no_table_and_gives_up_layers(workspace: Any) -> None:
    pytest.importorskip("transformers.models.gemma4_unified", reason="transformers 5.10 and newer have it")
    model = tiny_models.unified_text_model().to("meta")
    weights = sum(parameter.numel() * 2 for parameter in model.parameters())
    assert set(a_map(model, "auto", {0: 2 * weights, "cpu": "1GiB"}).values()) == {0}
    found = a_map(model, "auto", {0: weights // 2, "cpu": "1GiB"})
    assert set(found.values()) == {0, "cpu"}


def test_a_quantizer_is_as_strict_as_before_afterwards(workspace: Any, checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, "4bit", tmp_path, device_map="auto", max_memory={workspace.main: 44 * MIB})
    with pytest.raises(ValueError, match="Some modules are dispatched"):
        model.hf_quantizer.validate_environment(device_map={"a": "disk", "b": "cpu"})


def test_a_model_of_another_family_is_placed_by_upstream(workspace: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    memory = {0: "300KB", "cpu": "1GiB"}
    found = a_map(model, "auto", dict(memory))
    assert "cpu" in found.values()
    gemma4_compat.revert(PATCH.id)
    try:
        assert a_map(model, "auto", dict(memory)) == found
    finally:
        gemma4_compat.install()


def test_a_tower_alone_is_placed_by_upstream(workspace: Any) -> None:
    import torch
    from transformers.models.gemma4.modeling_gemma4 import Gemma4VisionModel

    with torch.device("meta"):
        model = Gemma4VisionModel(tiny_configs.config().vision_config)
    assert "cpu" in a_map(model, "auto", {0: "1KB", "cpu": "1GiB"}).values()
