"""Checkpoints of each kind of text model, and adapters for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_adapters, tiny_models

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
#: Adapters by name: the checkpoint, and what their configuration says. Of several ranks and scales is "patterns".
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "language": ("small", {"target_modules": TEXT}),
    "query": ("small", {"target_modules": r".*language_model\..*\.q_proj"}),
    "up": ("small", {"target_modules": r".*language_model\..*\.up_proj"}),
    "inputs": (
        "small",
        {"target_modules": ["per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"]},
    ),
    "towers": ("small", {"target_modules": r".*(vision_tower|audio_tower)\..*\.(q_proj|ffw_layer_1)\.linear"}),
    "embedders": ("small", {"target_modules": r".*\.embedding_projection"}),
    "patterns": (
        "small",
        {
            "target_modules": TEXT,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 8},
            "alpha_pattern": {"o_proj": 3},
        },
    ),
    "stabilized": ("small", {"target_modules": TEXT, "use_rslora": True}),
    "keys": ("large", {"target_modules": r".*language_model\..*\.(q_proj|k_proj|v_proj)"}),
    "router": ("experts", {"target_modules": r".*\.router\.proj"}),
    "attention": ("experts", {"target_modules": r".*language_model\..*\.(q_proj|k_proj|o_proj)"}),
    "experts": ("experts", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "swapped": ("experts", {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]}),
    "down": ("experts", {"target_parameters": ["experts.down_proj"]}),
}


@pytest.fixture(scope="session")
def bases(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints: "small" as the E2B, "large" as the 31B, "experts" as the 26B-A4B."""
    folder = tmp_path_factory.mktemp("bases")
    tiny_models.build_checkpoint(folder / "large", text_variant="31B")
    tiny_models.build_checkpoint(folder / "experts", text_variant="26B-A4B")
    return {"small": workspace.checkpoint, "large": folder / "large", "experts": folder / "experts"}


@pytest.fixture(scope="session")
def adapters(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``adapters(name)``: the folder of one of :data:`ADAPTERS`, and of its base."""
    folder = tmp_path_factory.mktemp("adapters")

    def get(name: str) -> tuple[Path, Path]:
        kind, options = ADAPTERS[name]
        if not (folder / name).exists():
            targets = {"targets": options.get("target_modules", [])}
            rest = {key: value for key, value in options.items() if key != "target_modules"}
            tiny_adapters.write_adapter(tiny.load(bases[kind]), **targets, folder=folder / name, **rest)
        return folder / name, bases[kind]

    return get
