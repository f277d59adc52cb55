"""Readers of what this package writes: mlx-lm, mlx-vlm, llama.cpp. ``nox -s readers`` installs them.

Elsewhere a test is skipped, with the reason, where its package is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_adapters, tiny_models
from tests.world.readers import models

_HERE = Path(__file__).parent
VARIANTS = ("E2B", "31B", "26B-A4B")
TEXT = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|proj|per_layer_input_gate)"
#: Adapters of the text model by name; "experts" is for the 26B-A4B alone.
KINDS: dict[str, dict[str, Any]] = {
    "linears": {"target_modules": TEXT},
    "patterns": {
        "target_modules": TEXT,
        "rank_pattern": {"q_proj": 2, "down_proj": 8},
        "alpha_pattern": {"o_proj": 3},
    },
    "experts": {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}
CASES = [(variant, kind) for variant in VARIANTS for kind in KINDS if kind != "experts" or variant == "26B-A4B"]


@pytest.hookimpl(tryfirst=True)  # before what is marked is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.full)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    return tmp_path_factory.mktemp("readers")


@pytest.fixture(scope="session")
def checkpoint(place: Path) -> Callable[[str], Path]:
    """``checkpoint(variant)``: one as Google's. All experts are used, for a rounding may decide which are chosen."""

    def get(variant: str) -> Path:
        folder = place / variant
        if not folder.exists():
            tiny_models.build_checkpoint(place / f"{variant}-saved", variant=variant)
            models.as_released(place / f"{variant}-saved", folder)
            config = json.loads((folder / "config.json").read_text())
            if config["text_config"].get("num_experts"):
                config["text_config"]["top_k_experts"] = config["text_config"]["num_experts"]
                (folder / "config.json").write_text(json.dumps(config))
        return folder

    return get


@pytest.fixture(scope="session")
def adapter(place: Path, checkpoint: Callable[[str], Path]) -> Callable[..., Path]:
    """``adapter(variant, kind, **options)``: an adapter with non-zero weights."""

    def get(variant: str, kind: str, **options: Any) -> Path:
        folder = place / "-".join([variant, kind, *options])
        if not folder.exists():
            rest = {**KINDS[kind], **options}
            tiny_adapters.write_adapter(tiny.load(checkpoint(variant)), rest.pop("target_modules"), folder, **rest)
        return folder

    return get
