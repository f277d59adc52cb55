"""F96: the old names of a text model's configuration have the values of ``config.json``, as before 5.15."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gemma4_compat._gemma4.models import config_names, variants
from gemma4_compat._lab import tiny_configs
from gemma4_compat.patches.checkpoints.transformers_config_reads import PATCH
from tests.conftest import is_affected
from tests.helpers import without
from tests.patches.promise import Promise

NAMES = ("head_dim", "num_key_value_heads", *config_names.NAMES)
#: What transformers before 5.15 says of the tiny models.
EXPECTED: dict[str, tuple[int | None, ...]] = {
    "E2B": (32, 1, 64, None),
    "E4B": (32, 2, 64, None),
    "12B": (32, 2, 64, 1),
    "26B-A4B": (32, 2, 64, 1),
    "31B": (32, 2, 64, 1),
}
affected = pytest.mark.skipif(not is_affected(PATCH), reason="this transformers has no settings by layer")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"AmbiguousGlobalPerLayerAttributeError: '(head_dim|num_key_value_heads)' is a per-layer attribute"
    exact = False  # a configuration is looked at


def config_of(variant: str) -> Any:
    import transformers

    if variant == variants.UNIFIED and not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no gemma4_unified")
    return tiny_configs.config(variant=variant)


def text_of(variant: str = "31B") -> Any:
    return config_of(variant).get_text_config()


def said(config: Any) -> tuple[Any, ...]:
    return tuple(getattr(config, name) for name in NAMES)


@pytest.mark.parametrize("variant", variants.NAMES)
def test_every_name_is_what_it_was_before(variant: str) -> None:
    text = text_of(variant)
    assert said(text) == EXPECTED[variant]
    assert [getattr(text, name, "default") for name in NAMES] == list(EXPECTED[variant])
    assert all(hasattr(text, name) for name in NAMES)
    assert all(name in text for name in NAMES)
    assert len(list(text)) == len(set(text))


@affected
def test_a_name_that_is_nowhere_is_one_call() -> None:
    """Every token reads eleven of them."""
    text, called = text_of(), []

    def look(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and "gemma4_compat" in frame.f_code.co_filename:
            called.append(frame.f_code.co_name)

    assert getattr(text, "nowhere", None) is None
    sys.setprofile(look)
    try:
        assert getattr(text, "nowhere", None) is None
    finally:
        sys.setprofile(None)
    assert called == ["installed"]
    with pytest.raises(AttributeError, match="'Gemma4TextConfig' object has no attribute 'nowhere'"):
        text.nowhere  # noqa: B018


@affected
def test_a_property_that_raises_says_why() -> None:
    class Own(type(text_of())):  # type: ignore[misc]
        @property
        def own(self) -> None:
            raise AttributeError("its own reason")

    text = Own()
    assert not hasattr(text, "nowhere")
    with pytest.raises(AttributeError, match="its own reason"):
        text.own  # noqa: B018


@pytest.mark.parametrize("variant", variants.NAMES)
def test_what_is_written_is_what_is_written_without_it(tmp_path: Path, variant: str) -> None:
    config = config_of(variant)

    def written(folder: Path) -> list[Any]:
        config.save_pretrained(folder)
        text = config.get_text_config()
        file = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return [file, config.to_dict(), config.to_json_string(), config.to_diff_dict(), text.to_dict(), vars(text)]

    said(config.get_text_config())
    found = written(tmp_path / "on")
    with without(PATCH.id):
        assert written(tmp_path / "off") == found
    loaded = type(config).from_pretrained(tmp_path / "on")
    assert loaded.to_dict() == config.to_dict()
    assert said(loaded.get_text_config()) == EXPECTED[variant]


@pytest.mark.parametrize("variant", variants.NAMES)
def test_copies_and_pickles_say_the_same(variant: str) -> None:
    text = text_of(variant)
    for other in (copy.copy(text), copy.deepcopy(text), pickle.loads(pickle.dumps(text))):
        assert said(other) == EXPECTED[variant]
        assert other.to_dict() == text.to_dict()
        assert other == text
    with without(PATCH.id):  # nothing of it is in a pickle
        assert pickle.loads(pickle.dumps(text)).to_dict() == text.to_dict()


@affected
@pytest.mark.parametrize("variant", variants.NAMES)
def test_layers_and_towers_are_left_alone(variant: str) -> None:
    config = config_of(variant)
    text = config.get_text_config()
    towers = [tower for tower in (config.vision_config, getattr(config, "audio_config", None)) if tower is not None]

    def seen() -> list[Any]:
        layers = [*text.per_layer_config, text.per_layer_config["full_attention"]]
        return [[getattr(each, name, "absent") for name in NAMES] for each in [config, *layers, *towers]]

    found = seen()
    with without(PATCH.id):
        assert seen() == found


@affected
def test_a_name_that_is_set_counts_for_the_layers_it_is_about() -> None:
    text = text_of()
    text.global_head_dim = 128
    assert said(text) == (32, 2, 128, 1)
    assert {layer.head_dim for layer in text.per_layer_config} == {32, 128}
    assert text.per_layer_config["sliding_attention"].head_dim == 32
    text.num_global_key_value_heads = None
    assert {layer.num_key_value_heads for layer in text.per_layer_config} == {2}
    assert said(type(text).from_dict(text.to_dict())) == (32, 2, 128, None)
    assert type(text).from_dict(text.to_dict(), global_head_dim=96).per_layer_config["full_attention"].head_dim == 96


@affected
def test_layers_that_no_name_can_tell_are_an_attribute_error_too() -> None:
    from transformers.integrations.heterogeneity import AmbiguousGlobalPerLayerAttributeError
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    shape = tiny_configs.text_shape()
    shape["per_layer_config"] = {2: {"head_dim": 64}, 5: {"head_dim": 128}}
    text = Gemma4TextConfig(**shape)
    assert getattr(text, "head_dim", None) is None
    assert getattr(text, "global_head_dim", None) is None
    assert not hasattr(text, "head_dim")
    assert "head_dim" not in text
    with pytest.raises(AttributeError, match="'head_dim' is a per-layer attribute") as caught:
        text.head_dim  # noqa: B018
    assert isinstance(caught.value, AmbiguousGlobalPerLayerAttributeError)


@affected
def test_the_switch_of_transformers_is_obeyed() -> None:
    text = text_of()
    text.allow_global_per_layer_attribute_access = False
    assert getattr(text, "head_dim", None) is None
    assert "head_dim" not in text
    text.allow_global_per_layer_attribute_access = True
    assert text.head_dim == 32


@affected
def test_layers_that_are_all_alike() -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    text = Gemma4TextConfig(**{**tiny_configs.text_shape(), "global_head_dim": 32})
    assert said(text) == (32, 1, 32, None)
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        text.missing  # noqa: B018


@affected
def test_transformers_reads_none_of_them_where_it_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It warns of each read that its switch allows. Making, loading and writing a configuration is no such read."""
    from transformers.integrations.heterogeneity import configuration_utils

    logger = mock.Mock()
    monkeypatch.setattr(configuration_utils, "logger", logger)
    text = text_of()
    type(text).from_dict(text.to_dict())
    assert said(text) == EXPECTED["31B"]
    assert not logger.warning_once.called
