"""The audio tower hears the same whatever attention the model is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_configs
from gemma4_compat._lab.scenarios import features
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.multimodal import transformers_audio_mask as subject
from tests.conftest import is_affected
from tests.patches.promise import Promise

concerned = pytest.mark.skipif(not is_affected(subject.PATCH), reason="this release's audio tower is eager by itself")


class TestPromise(Promise):
    patch_id = subject.PATCH.id
    original = r"sound features are off by 0\.\d+ of their size"


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    subject._say.cache_clear()
    yield
    subject._say.cache_clear()


@pytest.fixture
def sound(workspace: Any) -> dict[str, Any]:
    """Two sounds longer than the tower's window, one of them padded."""
    import torch

    device = tiny.inputs(workspace.main)["input_ids"].device
    generator = torch.Generator().manual_seed(17)
    return {
        "input_features": torch.randn(2, 200, 128, generator=generator).to(device),
        "input_features_mask": (torch.arange(200) < torch.tensor([[200], [90]])).to(device),
    }


@concerned
@pytest.mark.parametrize("asked", ["eager", "flex_attention"])
def test_every_way_to_ask_gives_the_same_sound(
    workspace: Any, sound: dict[str, Any], caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    expected = features(workspace.load(), sound, "audio")
    with caplog.at_level(logging.INFO, logger="gemma4_compat"):
        models = [
            tiny.load(workspace.checkpoint, device=workspace.main, attn_implementation=way)
            for way in (asked, {"audio_config": asked}, {"": asked, "audio_config": asked})
        ]
        later = workspace.load()
        later.set_attn_implementation(asked)
        named = workspace.load()
        named.set_attn_implementation({"audio_config": asked})
    for model in (*models, later, named):
        assert model.config.audio_config._attn_implementation == "eager"
        assert (features(model, sound, "audio") - expected).abs().max() == 0.0
    assert models[0].config.text_config._attn_implementation == asked
    assert models[0].config.vision_config._attn_implementation == asked
    said = [record.getMessage() for record in caplog.records if record.name == "gemma4_compat"]
    if asked == "eager":
        assert said == []
    else:
        (line,) = said
        assert line.endswith("cannot run attn_implementation='flex_attention' and runs its eager attention")


@concerned
def test_undone_the_defect_is_back(workspace: Any, sound: dict[str, Any]) -> None:
    expected = features(workspace.load(), sound, "audio")
    gemma4_compat.revert(subject.PATCH.id)
    try:
        eager = tiny.load(workspace.checkpoint, device=workspace.main, attn_implementation="eager")
        assert (features(eager, sound, "audio") - expected).norm() > 0.1 * expected.norm()
        flex = tiny.load(workspace.checkpoint, device=workspace.main, attn_implementation="flex_attention")
        assert flex.config.audio_config._attn_implementation == "flex_attention"
    finally:
        gemma4_compat.install()


@concerned
def test_logits_under_sdpa_text_and_eager_sound_are_the_usual_ones(workspace: Any) -> None:
    model = tiny.load(workspace.checkpoint, device=workspace.main, attn_implementation="sdpa")
    assert model.config.audio_config._attn_implementation == "sdpa"
    model.set_attn_implementation({"audio_config": "eager"})
    assert difference(workspace.outputs(workspace.load()), workspace.outputs(model)) == 0.0


@concerned
def test_flash_attention_is_not_for_the_tower(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package only the decision can be seen, with upstream's check for it stubbed."""
    from transformers import Gemma4AudioModel
    from transformers.utils import is_flash_attn_2_available

    config = tiny_configs.config().audio_config
    if not is_flash_attn_2_available():
        config._attn_implementation = "flash_attention_2"
        with pytest.raises(ImportError, match="FlashAttention2 has been toggled on, but it cannot be used"):
            Gemma4AudioModel(config)
    monkeypatch.setattr(Gemma4AudioModel, "_flash_attn_can_dispatch", lambda self, *args, **options: True)
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda *args, **options: (None, None)
    )
    config._attn_implementation = "flash_attention_2"
    assert Gemma4AudioModel(config).config._attn_implementation == "eager"


@concerned
def test_what_is_unknown_is_still_upstreams_error(workspace: Any) -> None:
    with pytest.raises(ValueError, match='Specified `attn_implementation="nonsense"` is not supported'):
        workspace.load().set_attn_implementation({"audio_config": "nonsense"})
