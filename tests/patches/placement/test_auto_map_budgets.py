"""F50: ``device_map="auto"`` and its kin never raise where upstream has a map, whatever ``max_memory`` says."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat._lab.workspace import Workspace, difference
from gemma4_compat.patches.placement.transformers_auto_map import PATCH

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
DRAWS = 40


def size_of(model: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def max_memory(draw: random.Random, size: int) -> dict[Any, Any]:
    """Up to four devices with 0.3 to 1.2 of the model's size each, some with none, as numbers and as text."""
    found: dict[Any, Any] = {}
    for device in draw.sample([0, 1, 2, "cpu", "disk"], draw.randint(1, 4)):
        budget = 0 if draw.random() < 0.1 else int(draw.uniform(0.3, 1.2) * size)
        found[device] = draw.choice([budget, f"{budget // 1024}KiB"])
    return found


def runs_from_disk() -> bool:
    """Whether transformers can run a model that is on disk as a whole."""
    import transformers

    return versions.admits(">=5.13", transformers.__version__)


def map_of(model: Any, strategy: str, memory: dict[Any, Any]) -> dict[str, Any]:
    from transformers.integrations.accelerate import _get_device_map

    placement: dict[str, Any] = _get_device_map(model, strategy, dict(memory), None)
    return placement


@pytest.fixture(scope="module", params=[None, *variants.NAMES, "text"])
def on_meta(request: pytest.FixtureRequest, workspace: Any) -> Any:
    import torch
    import transformers

    if request.param == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified", reason="transformers 5.10 and newer have it")
    config = tiny_configs.config(variant=None if request.param == "text" else request.param)
    kind = "Gemma4Unified" if request.param == variants.UNIFIED else "Gemma4"
    with torch.device("meta"):
        if request.param == "text":
            model = transformers.Gemma4ForCausalLM(config.text_config)
        else:
            model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return model.to(torch.bfloat16)


def test_there_is_a_map_wherever_upstream_has_one_and_it_is_complete(on_meta: Any) -> None:
    draw = random.Random(50)
    size = size_of(on_meta)
    cases = [(max_memory(draw, size), draw.choice(STRATEGIES)) for _ in range(DRAWS)]
    upstream: list[set[Any] | None] = []  # where each puts something; None: it raises
    gemma4_compat.revert(PATCH.id)
    try:
        for memory, strategy in cases:
            try:
                upstream.append(set(map_of(on_meta, strategy, memory).values()))
            except (KeyError, IndexError):  # "balanced_low_0" without a device 0
                upstream.append(None)
    finally:
        gemma4_compat.install()
    seen = 0
    for (memory, strategy), devices in zip(cases, upstream, strict=True):
        if devices is None or (devices == {"disk"} and not runs_from_disk()):
            continue
        found = map_of(on_meta, strategy, memory)
        missing = [name for name in on_meta.state_dict() if device_maps.entry_for(name, found) is None]
        assert not missing, (strategy, memory)
        assert set(found.values()) <= {*memory, "cpu", "disk"}
        seen += 1
    assert seen > DRAWS // 2


@pytest.fixture(scope="module", params=[None, *variants.NAMES])
def variant(request: pytest.FixtureRequest, workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    if request.param == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified", reason="transformers 5.10 and newer have it")
    if workspace.main != "cpu":
        pytest.skip("budgets for a CPU and a disk")
    return Workspace.build(tmp_path_factory.mktemp("variant") / "workspace", request.param)


@pytest.fixture(scope="module")
def whole(variant: Workspace) -> Callable[[str | None], tuple[int, Any]]:
    """``whole(quantization)``: the size of that model in bytes and its answers, on one device."""

    @functools.cache
    def found(quantization: str | None) -> tuple[int, Any]:
        model = variant.load(quantization)
        return size_of(model), variant.outputs(model)

    return found


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])  # of upstream's test_cpu_offload and test_disk_offload
def test_upstreams_own_budgets_load_and_answer_like_one_device(
    variant: Workspace, whole: Callable[..., Any], tmp_path: Path, share: float
) -> None:
    size, expected = whole(None)
    memory = {"cpu": int(share * size)}
    model = tiny.load(variant.checkpoint, device_map="auto", max_memory=memory, offload_folder=tmp_path)
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert difference(expected, variant.outputs(model)) == 0.0


@pytest.mark.parametrize("seed", range(2))
def test_any_budget_loads_and_answers_like_one_device(
    variant: Workspace, whole: Callable[..., Any], tmp_path: Path, seed: int
) -> None:
    draw = random.Random(f"{variant.variant} {seed}")
    quantization = draw.choice([None, None, "4bit", "8bit"])
    size, expected = whole(quantization)
    memory = {"cpu": int(draw.uniform(0.3, 1.2) * size)}
    strategy = draw.choice(STRATEGIES)
    model = tiny.load(
        variant.checkpoint, quantization, device_map=strategy, max_memory=memory, offload_folder=tmp_path
    )
    assert difference(expected, variant.outputs(model)) == 0.0, json.dumps([strategy, memory])


def test_an_assistant_and_a_bare_model_get_a_map(workspace: Any, tmp_path: Path) -> None:
    import transformers

    inner = workspace.load().model
    models = [inner, inner.language_model]
    if hasattr(transformers, "Gemma4AssistantForCausalLM"):
        folder = tiny_models.build_assistant(workspace.checkpoint, tmp_path)
        models.append(transformers.Gemma4AssistantForCausalLM.from_pretrained(folder))
    for model in models:
        model.to("meta")
        assert map_of(model, "auto", {0: size_of(model) // 2, "cpu": 1 << 40})
