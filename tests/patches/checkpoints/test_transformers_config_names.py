"""F55: a saved ``config.json`` has the settings of full attention under the names that other readers read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.models import config_names, variants
from gemma4_compat._lab import tiny_configs
from gemma4_compat.patches.checkpoints.transformers_config_names import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise

HEADS = {"E2B": None, "E4B": None, "12B": 1, "26B-A4B": 1, "31B": 1}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"lacks: global_head_dim, num_global_key_value_heads"
    exact = False  # a file is looked at


def config_of(variant: str) -> Any:
    import transformers

    if variant == variants.UNIFIED and not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no gemma4_unified")
    return tiny_configs.config(variant=variant)


def saved(config: Any, folder: Path) -> dict[str, Any]:
    config.save_pretrained(folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("variant", variants.NAMES)
def test_the_names_are_there_and_the_configuration_is_the_same(tmp_path: Path, variant: str) -> None:
    config = config_of(variant)
    text = saved(config, tmp_path)["text_config"]
    assert (text["global_head_dim"], text["num_global_key_value_heads"]) == (64, HEADS[variant])
    loaded = type(config).from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert not config_names.NAMES.keys() & vars(loaded.text_config).keys() or not is_affected(PATCH)
    assert saved(loaded, tmp_path / "again") == saved(config, tmp_path / "first")
    assert saved(config.get_text_config(), tmp_path / "text")["global_head_dim"] == 64
    assert copy.deepcopy(config).to_dict() == config.to_dict()


@pytest.mark.parametrize("variant", ["E2B", "26B-A4B", "31B"])
def test_the_names_alone_are_enough(tmp_path: Path, variant: str) -> None:
    """As for a reader that does not know ``per_layer_config``."""
    config = config_of(variant)
    data = saved(config, tmp_path)
    data["text_config"].pop("per_layer_config", None)
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    assert type(config).from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_layers_that_differ_are_left_as_they_are(tmp_path: Path) -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    if not is_affected(PATCH):
        pytest.skip("this transformers has no settings by layer")
    shape = tiny_configs.text_shape()
    shape["per_layer_config"] = {2: {"head_dim": 64}, 5: {"head_dim": 128}}
    assert "global_head_dim" not in saved(Gemma4TextConfig(**shape), tmp_path)


TYPES = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param({}, {}, id="nothing by layer"),
        pytest.param({"per_layer_config": {}}, {}, id="no kinds"),
        pytest.param({"per_layer_config": [], "layer_types": TYPES}, {}, id="a list"),
        pytest.param({"per_layer_config": {"x": {}}, "layer_types": TYPES}, {}, id="not a number"),
        pytest.param({"per_layer_config": {"1": 4}, "layer_types": TYPES}, {}, id="not settings"),
        pytest.param({"per_layer_config": {"1": {"head_dim": 8}}, "layer_types": TYPES}, {}, id="one of two"),
        pytest.param(
            {"per_layer_config": {"0": {"head_dim": 8}}, "layer_types": TYPES}, {}, id="a layer of the other kind"
        ),
        pytest.param(
            {"per_layer_config": {"1": {"sliding_window": 8}, "3": {"sliding_window": 8}}, "layer_types": TYPES},
            {},
            id="another setting",
        ),
        pytest.param(
            {"per_layer_config": {"01": {"head_dim": 8}, "03": {"head_dim": 8}}, "layer_types": TYPES},
            {"global_head_dim": 8, "num_global_key_value_heads": None},
            id="both",
        ),
        pytest.param(
            {"per_layer_config": {}, "layer_types": TYPES, "head_dim": 4},
            {"global_head_dim": 4, "num_global_key_value_heads": None},
            id="all alike",
        ),
        pytest.param(
            {"per_layer_config": {}, "layer_types": TYPES, "global_head_dim": 4, "num_global_key_value_heads": 2},
            {},
            id="there already",
        ),
    ],
)
def test_what_the_names_can_say(text: dict[str, Any], expected: dict[str, Any]) -> None:
    assert config_names.restored(text) == expected
