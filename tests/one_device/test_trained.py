"""The trained model: its answers mean something, and are the same wherever its weights are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._reproduction import tiny
from gemma4_compat._reproduction.trained import PLACE, Trained
from tests.helpers import ROOT
from tools.trained_model import assistant, batches, files, measure, media, model, questions

pytestmark = pytest.mark.xdist_group("trained")

TRAINED = Trained(ROOT / PLACE)
SEE, HEAR = "What is in the picture?", "What do you hear?"
#: What is asked, with which picture and sound, and the answer.
ASKED: list[tuple[str, str | None, str | None, str]] = [
    ("What colour is the sky?", None, None, "The sky is blue."),
    ("How many legs has a fox?", None, None, "A fox has four legs."),
    (SEE, "red-square", None, "a red square"),
    (SEE, "grey-cross", None, "a grey cross"),
    (HEAR, None, "rising-tone", "a rising tone"),
    (HEAR, None, "hiss", "a hiss"),
]


@pytest.fixture(scope="module")
def whole() -> Any:
    return TRAINED.load()


def answers(model: Any, **options: Any) -> list[str]:
    return [
        TRAINED.answer(model, asked, picture=picture, sound=sound, **options) for asked, picture, sound, _ in ASKED
    ]


def test_it_answers(whole: Any) -> None:
    assert answers(whole) == [answer for *_, answer in ASKED]


def test_it_names_shapes_and_sounds_that_it_has_not_met(whole: Any) -> None:
    draw = random.Random(12345)
    for kind in ("picture", "sound"):  # by chance one of 20, and one of 6
        assert sum(measure.right(whole, [questions.asked(draw, kind) for _ in range(40)])) >= 28, kind


def test_its_assistant_drafts_its_answers(whole: Any) -> None:
    pytest.importorskip("transformers.models.gemma4_assistant")
    drafting = assistant.load(TRAINED)
    draw = random.Random(54321)
    rows = [questions.asked(draw, kind) for kind in measure.COMPARED for _ in range(2)]
    assert assistant.tokens_a_forward(whole, drafting, rows) > 3  # with four drafts, 5 at most
    assert answers(whole, assistant_model=drafting) == [answer for *_, answer in ASKED]


def test_it_tells_a_story(whole: Any) -> None:
    told = TRAINED.answer(whole, "Tell of a fox and an owl.", max_new_tokens=160)
    assert told.startswith("Once ")
    assert told.endswith(".")
    assert told.count(".") == 3


@pytest.mark.parametrize("offload", [pytest.param("towers", marks=pytest.mark.full), "both"])
def test_answers_are_the_same_with_modules_on_disk(offload: str, whole: Any, tmp_path: Path) -> None:
    split = TRAINED.load()
    tiny.dispatch(split, tiny.device_map(split, offload, main="cpu", offloaded="disk"), tmp_path)
    assert answers(split) == [answer for *_, answer in ASKED]


@pytest.mark.full
def test_the_embeddings_on_disk(tmp_path: Path) -> None:
    split = TRAINED.load()
    placement = tiny.device_map(split, "towers", main="cpu", offloaded="disk")
    placement["model.language_model.embed_tokens_per_layer"] = "disk"
    tiny.dispatch(split, placement, tmp_path)
    assert answers(split) == [answer for *_, answer in ASKED]


def test_the_adapter_speaks_like_a_pirate_wherever_the_layers_are(tmp_path: Path) -> None:
    from peft import PeftModel

    split = TRAINED.load()
    tiny.dispatch(split, tiny.device_map(split, "both", main="cpu", offloaded="disk"), tmp_path)
    adapted = PeftModel.from_pretrained(split, str(TRAINED.adapter)).eval()
    assert answers(adapted) == [questions.as_pirate(answer) for *_, answer in ASKED]
    with adapted.disable_adapter():
        assert answers(adapted) == [answer for *_, answer in ASKED]


@pytest.mark.full
def test_a_merge_keeps_its_answers_and_four_bits_most_of_them() -> None:
    compared = measure.measured(TRAINED)["compared"]
    assert compared["bf16, merged"]["right"] > compared["4-bit, merged into the 4-bit weights"]["right"]
    into, before = (compared[name]["nats"] for name in measure.MERGES)
    assert into > before


def test_its_prompts_are_those_of_training() -> None:
    row = batches.Row()
    row.add(batches.texts.Turn("picture", SEE, "a red square"), picture=TRAINED.picture("red-square"))
    prompt = TRAINED.prompt(SEE, picture="red-square")["input_ids"][0].tolist()
    assert row.ids[: len(prompt)] == prompt
    assert model.tokenizer().decode(row.ids[len(prompt) : -2]) == "a red square"


def test_its_files_are_those_that_the_script_writes(tmp_path: Path) -> None:
    files.write_examples(tmp_path)
    for file in tmp_path.rglob("*.*"):
        assert file.read_bytes() == (TRAINED.folder / file.relative_to(tmp_path)).read_bytes(), file.name
    assert len(list(TRAINED.folder.glob("pictures/*"))) == len(media.COLOURS) * len(media.SHAPES)
    config = json.loads((TRAINED.checkpoint / "config.json").read_text(encoding="utf-8"))
    made = model.config().to_dict()
    assert config["text_config"]["global_head_dim"] == 64, "as released ones say it"
    assert "per_layer_config" not in config["text_config"]
    assert config["audio_config"]["subsampling_conv_channels"] == made["audio_config"]["subsampling_conv_channels"]
    processor = json.loads((TRAINED.checkpoint / "processor_config.json").read_text(encoding="utf-8"))
    assert processor == files.processor()


def test_it_is_small_and_as_good_as_it_has_to_be() -> None:
    assert sum(file.stat().st_size for file in TRAINED.folder.rglob("*") if file.is_file()) < 10_000_000
    found = json.loads((TRAINED.folder / measure.FILE).read_text(encoding="utf-8"))
    assert measure.missed(found) == []
    assert found["training"]["device"] == "cpu"


def test_a_model_that_is_worse_is_named() -> None:
    found = json.loads((TRAINED.folder / measure.FILE).read_text(encoding="utf-8"))
    found["right"]["sound"], found["held_out_loss"] = 0.5, 9.0
    said = measure.missed(found)
    assert len(said) == 2
    assert said[0].startswith("sound: 50% right")
