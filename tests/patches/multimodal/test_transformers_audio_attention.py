"""An attention that is asked for the whole model: what each part runs, what is said, and what still raises."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat._lab.scenarios import features
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.multimodal import transformers_audio_attention as subject
from tests.conftest import is_affected
from tests.patches.promise import Promise

PARTS = ("text_config", "vision_config", "audio_config")
UNSUPPORTED = "Gemma4AudioModel does not support an attention implementation through"
concerned = pytest.mark.skipif(not is_affected(subject.PATCH), reason="this release's audio tower takes any request")


class TestPromise(Promise):
    patch_id = subject.PATCH.id
    original = rf"ValueError: {UNSUPPORTED}"


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    subject._say.cache_clear()
    yield
    subject._say.cache_clear()


@pytest.fixture
def load(workspace: Any) -> Callable[..., Any]:
    def loaded(asked: Any, **options: Any) -> Any:
        return tiny.load(workspace.checkpoint, device=workspace.main, attn_implementation=asked, **options)

    return loaded


def runs(model: Any) -> list[str]:
    return [model.config._attn_implementation, *(getattr(model.config, part)._attn_implementation for part in PARTS)]


@concerned
@pytest.mark.parametrize("asked", ["sdpa", "flex_attention"])
def test_what_each_part_runs_is_what_the_dict_form_gives(
    workspace: Any, load: Callable[..., Any], caplog: pytest.LogCaptureFixture, asked: str
) -> None:
    with caplog.at_level(logging.INFO, logger="gemma4_compat"):
        model, again = load(asked), load(asked)
    named = load({"": asked, "text_config": asked, "vision_config": asked, "audio_config": "eager"})
    assert runs(model) == runs(again) == runs(named) == [asked, asked, asked, "eager"]
    (line,) = [record for record in caplog.records if record.name == "gemma4_compat"]
    assert line.levelno == logging.INFO
    assert line.getMessage() == (
        f"gemma4_compat: attn_implementation={asked!r} is for the text and vision models; "
        "the audio tower has only eager attention and runs that"
    )
    batch = tiny.inputs(workspace.main)
    # To run flex attention on a CPU, a compiler is needed: what the tower hears needs none.
    for sense in ("vision", "audio") if asked == "sdpa" else ("audio",):
        assert (features(model, batch, sense) - features(named, batch, sense)).abs().max() == 0.0
    if asked == "sdpa":
        assert difference(workspace.outputs(named), workspace.outputs(model)) == 0.0


@concerned
@pytest.mark.parametrize(
    "asked",
    [
        {"audio_config": "sdpa"},
        {"audio_config": "flex_attention"},
        {"": "sdpa", "audio_config": "sdpa"},
        {"text_config": "sdpa", "vision_config": "sdpa", "audio_config": "sdpa"},
        {"text_config": "eager", "audio_config": "sdpa"},
    ],
    ids=str,
)
def test_the_tower_asked_by_name_is_still_upstreams_error(load: Callable[..., Any], asked: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=UNSUPPORTED):
        load(asked)
    model = load(None)
    before = runs(model)
    if asked.get("audio_config") == "sdpa":
        with pytest.raises(ValueError, match=UNSUPPORTED):
            model.set_attn_implementation(asked)
        assert runs(model)[-1] == before[-1]


@pytest.mark.parametrize(
    "asked, expected",
    [
        ({"text_config": "eager"}, "eager"),
        ({"text_config": "eager", "vision_config": "sdpa", "audio_config": "eager"}, "eager"),
        ({"": "eager", "text_config": "sdpa"}, "sdpa"),
    ],
    ids=str,
)
def test_a_dict_keeps_its_meaning(
    load: Callable[..., Any], caplog: pytest.LogCaptureFixture, asked: dict[str, str], expected: str
) -> None:
    with caplog.at_level(logging.INFO, logger="gemma4_compat"):
        model = load(asked)
    assert model.config._attn_implementation == asked.get("", "sdpa")
    assert model.config.text_config._attn_implementation == expected
    assert not [record for record in caplog.records if record.name == "gemma4_compat"]


@concerned
def test_every_way_to_ask(workspace: Any) -> None:
    import transformers
    from transformers import AutoConfig, Gemma4ForConditionalGeneration, Gemma4Model

    wanted = ["sdpa", "sdpa", "sdpa", "eager"]

    def config() -> Any:
        found = AutoConfig.from_pretrained(workspace.checkpoint)
        found._attn_implementation = "sdpa"
        return found

    assert runs(Gemma4ForConditionalGeneration(config())) == wanted
    assert runs(Gemma4Model(config())) == wanted
    assert runs(Gemma4ForConditionalGeneration._from_config(config())) == wanted
    assert runs(Gemma4ForConditionalGeneration.from_pretrained(workspace.checkpoint, config=config())) == wanted
    assert runs(Gemma4Model.from_pretrained(workspace.checkpoint, attn_implementation="sdpa")) == wanted
    asked = AutoConfig.from_pretrained(workspace.checkpoint, attn_implementation="sdpa")
    assert runs(Gemma4ForConditionalGeneration(asked)) == wanted
    for name in ("AutoModelForImageTextToText", "AutoModelForMultimodalLM"):
        auto = getattr(transformers, name)
        assert runs(auto.from_pretrained(workspace.checkpoint, attn_implementation="sdpa")) == wanted
        plain = AutoConfig.from_pretrained(workspace.checkpoint)
        assert runs(auto.from_config(plain, attn_implementation="sdpa")) == wanted


#: The line of the guides, through each entry point: (checkpoint, class of the model) -> model.
ENTRIES: dict[str, Callable[[Any, Any], Any]] = {
    "from_pretrained": lambda folder, cls: cls.from_pretrained(folder, attn_implementation="sdpa"),
    "AutoModelForImageTextToText": lambda folder, cls: _auto("AutoModelForImageTextToText", folder),
    "AutoModelForCausalLM": lambda folder, cls: _auto("AutoModelForCausalLM", folder),
    "AutoModel": lambda folder, cls: _auto("AutoModel", folder),
    "from_config": lambda folder, cls: _from_config(folder, cls),
    "set_attn_implementation": lambda folder, cls: _set(cls.from_pretrained(folder)),
}


def _auto(name: str, folder: Any) -> Any:
    import transformers

    return getattr(transformers, name).from_pretrained(folder, attn_implementation="sdpa")


def _from_config(folder: Any, cls: Any) -> Any:
    from transformers import AutoConfig

    return cls._from_config(AutoConfig.from_pretrained(folder), attn_implementation="sdpa")


def _set(model: Any) -> Any:
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("variant", variants.NAMES)
def test_every_variant_loads_through_every_entry_point(tmp_path: Path, variant: str) -> None:
    """F102. The answers are those of a load without a request, which runs sdpa by itself."""
    import torch
    import transformers

    if variant == variants.UNIFIED and not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no gemma4_unified")
    tiny_models.build_checkpoint(tmp_path, variant=variant)
    cls = getattr(transformers, tiny_models.class_name(tmp_path))
    ids = torch.arange(3, 15)[None]
    usual = cls.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = usual(input_ids=ids).logits
    for name, enter in ENTRIES.items():
        model = enter(tmp_path, cls).eval()
        config = model.config
        assert config.get_text_config()._attn_implementation == "sdpa", name
        if getattr(config, "audio_config", None) is not None and variant != variants.UNIFIED:
            assert config.audio_config._attn_implementation == usual.config.audio_config._attn_implementation, name
        if type(model) is cls and name != "from_config":  # its weights are random
            with torch.no_grad():
                assert torch.equal(model(input_ids=ids).logits, expected), name


@concerned
@pytest.mark.parametrize("quantization, device_map", [("4bit", None), (None, "auto"), ("8bit", None)])
def test_quantized_and_dispatched_loads(workspace: Any, quantization: str | None, device_map: str | None) -> None:
    options: dict[str, Any] = {"device_map": device_map} if device_map else {"device": workspace.main}
    usual = tiny.load(workspace.checkpoint, quantization, **options)
    model = tiny.load(workspace.checkpoint, quantization, attn_implementation="sdpa", **options)
    assert runs(model) == ["sdpa", "sdpa", "sdpa", "eager"]
    assert difference(workspace.outputs(usual), workspace.outputs(model)) == 0.0


@concerned
def test_set_on_a_loaded_model_and_back(
    workspace: Any, load: Callable[..., Any], caplog: pytest.LogCaptureFixture, one_device: Callable[..., Any]
) -> None:
    model = load("eager")
    with caplog.at_level(logging.INFO, logger="gemma4_compat"):
        for asked in ("flex_attention", "sdpa", "eager", "sdpa"):
            model.set_attn_implementation(asked)
            assert runs(model) == [asked, asked, asked, "eager"]
    assert len([record for record in caplog.records if record.name == "gemma4_compat"]) == 2
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    model.set_attn_implementation({"text_config": "eager"})
    assert runs(model) == ["sdpa", "eager", "sdpa", "eager"]


@concerned
def test_a_wrapped_model_and_its_copies(workspace: Any, load: Callable[..., Any]) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(load("sdpa"), workspace.adapter("all"))
    model.set_attn_implementation("eager")
    model.set_attn_implementation("sdpa")
    assert runs(model) == ["sdpa", "sdpa", "sdpa", "eager"]
    plain = load("sdpa")
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert runs(other) == runs(plain)
        assert difference(workspace.outputs(plain), workspace.outputs(other)) == 0.0
    assert "eager" not in plain.config.to_json_string()


@concerned
def test_a_backend_of_the_users_own_leaves_the_sounds_mask(workspace: Any, load: Callable[..., Any]) -> None:
    """Upstream makes no mask at all for a name it does not know, and the tower's attention is its own anyway."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("mine", sdpa_attention_forward)
    try:
        model, usual = load("mine"), load(None)
        assert runs(model) == ["mine", "mine", "mine", "eager"]
        batch = tiny.inputs(workspace.main)
        assert (features(model, batch, "audio") - features(usual, batch, "audio")).abs().max() == 0.0
    finally:
        AttentionInterface._global_mapping.pop("mine", None)


@concerned
def test_errors_that_are_not_the_towers_stay(workspace: Any, load: Callable[..., Any]) -> None:
    from transformers import Gemma4AudioModel
    from transformers.utils import is_flash_attn_2_available

    with pytest.raises(ValueError, match='Specified `attn_implementation="nonsense"` is not supported'):
        load("nonsense")
    with pytest.raises(ValueError, match=UNSUPPORTED):
        Gemma4AudioModel.from_pretrained(workspace.checkpoint, attn_implementation="sdpa")
    if not is_flash_attn_2_available():
        model = load(None)
        error, said = ImportError, "FlashAttention2 has been toggled on, but it cannot be used"
        if not model._supports_flash_attn:  # since transformers 5.24.0, of the whole model
            error, said = ValueError, "does not support Flash Attention 2 yet"
        for ask in (load, model.set_attn_implementation):
            with pytest.raises(error, match=said):
                ask("flash_attention_2")
        assert runs(model) == ["sdpa", "sdpa", "sdpa", "eager"]


@concerned
def test_with_flash_attention_declared_available_the_tower_is_not_what_raises(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package only the decision can be seen: the text model's check is stubbed, the tower's is not."""
    from transformers import Gemma4AudioModel, Gemma4ForConditionalGeneration, Gemma4TextModel, Gemma4VisionModel

    model = load(None)
    for part in (Gemma4ForConditionalGeneration, Gemma4TextModel, Gemma4VisionModel):
        monkeypatch.setattr(part, "_flash_attn_can_dispatch", lambda self, **options: True)
        monkeypatch.setattr(part, "_check_and_adjust_attn_implementation", lambda self, asked, *args, **options: asked)
    assert not Gemma4AudioModel._supports_flash_attn
    model.set_attn_implementation("flash_attention_2")
    assert runs(model) == ["flash_attention_2"] * 3 + ["eager"]
    built = Gemma4ForConditionalGeneration.__new__(Gemma4ForConditionalGeneration)
    config = copy.deepcopy(model.config)
    config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr("transformers.models.gemma4.modeling_gemma4.Gemma4Model", _Stop)
    with pytest.raises(_StoppedError):
        built.__init__(config)  # type: ignore[misc]
    assert config.audio_config._attn_implementation == "eager"
    assert config.vision_config._attn_implementation == "flash_attention_2"


class _StoppedError(Exception):
    pass


class _Stop:
    def __init__(self, config: Any) -> None:
        raise _StoppedError


def test_a_model_without_an_audio_tower(workspace: Any) -> None:
    from transformers import Gemma4ForConditionalGeneration

    config = tiny_configs.config()
    config.audio_config = None
    config._attn_implementation = "sdpa"
    model = Gemma4ForConditionalGeneration(config)
    assert model.config.text_config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    assert model.config.vision_config._attn_implementation == "eager"


def test_text_models_and_the_12b_run_what_is_asked() -> None:
    from transformers import Gemma4ForCausalLM

    config = tiny_configs.config().text_config
    config._attn_implementation = "sdpa"
    assert Gemma4ForCausalLM(config).config._attn_implementation == "sdpa"
    import transformers

    if not hasattr(transformers, "Gemma4UnifiedForConditionalGeneration"):
        return
    unified = tiny_models.unified_text_model()
    unified.set_attn_implementation("eager")
    unified.set_attn_implementation("sdpa")
    assert unified.config._attn_implementation == "sdpa"


def test_another_model_that_declares_nothing_still_raises() -> None:
    from transformers import BloomConfig, BloomModel

    config = BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="BloomModel does not support an attention implementation through"):
        BloomModel(config)
