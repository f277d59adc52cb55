"""The trained model: its answers mean something, and are the same wherever its weights are."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny
from gemma4_compat._lab.trained import PLACE, TWINS, Trained
from tests.helpers import ROOT
from tools.trained_model import adapter, assistant, batches, files, kinds, measure, media, model, questions

pytestmark = pytest.mark.xdist_group("trained")

#: By kind: the first, and its twins.
ALL = {kind: Trained(ROOT / place) for kind, place in {"E2B": PLACE, **TWINS}.items()}
TRAINED = ALL["E2B"]
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
only = pytest.mark.parametrize  # of some kinds: only("kind", [...], indirect=True)


@pytest.fixture(scope="module", params=ALL)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == variants.UNIFIED and not hasattr(pytest.importorskip("transformers"), "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no gemma4_unified")
    return str(request.param)


@pytest.fixture(scope="module")
def trained(kind: str) -> Trained:
    return ALL[kind]


@pytest.fixture(scope="module")
def whole(trained: Trained) -> Any:
    return trained.load()


def asked(trained: Trained) -> list[tuple[str, str | None, str | None, str]]:
    return [one for one in ASKED if one[2] is None or trained is not ALL["26B-A4B"]]


def expected(trained: Trained, *, pirate: bool = False) -> list[str]:
    return [questions.as_pirate(answer) if pirate else answer for *_, answer in asked(trained)]


def answers(trained: Trained, model: Any, **options: Any) -> list[str]:
    return [
        trained.answer(model, question, picture=picture, sound=sound, **options)
        for question, picture, sound, _ in asked(trained)
    ]


def split(trained: Trained, away: str, folder: Path, quantization: str | None = None) -> Any:
    """The model with modules on disk: what :func:`tiny.device_map` calls ``away``, or only the ``"experts"``."""
    loaded = trained.load(quantization)
    placement = tiny.device_map(loaded, "none" if away == "experts" else away, main="cpu", offloaded="disk")
    if away == "experts":
        for name in [name for name in placement if ".layers." in name]:
            del placement[name]
            parts = [f"{name}.{part}" for part, _ in loaded.get_submodule(name).named_children()]
            placement |= {part: "disk" if part.endswith(".experts") else "cpu" for part in parts}
            placement[f"{name}.layer_scalar"] = "cpu"
    return tiny.dispatch(loaded, placement, folder)


def test_it_answers(trained: Trained, whole: Any) -> None:
    assert answers(trained, whole) == expected(trained)


def test_it_names_shapes_and_sounds_that_it_has_not_met(whole: Any) -> None:
    draw = random.Random(12345)
    for kind in {"picture", "sound"} & set(batches.mix(whole)):  # by chance one of 20, and one of 6
        assert sum(measure.right(whole, [questions.asked(draw, kind) for _ in range(40)])) >= 28, kind


@only("kind", ["E2B"], indirect=True)
def test_its_assistant_drafts_its_answers(trained: Trained, whole: Any) -> None:
    pytest.importorskip("transformers.models.gemma4_assistant")
    drafting = assistant.load(trained)
    draw = random.Random(54321)
    rows = [questions.asked(draw, kind) for kind in measure.COMPARED for _ in range(2)]
    assert assistant.tokens_a_forward(whole, drafting, rows) > 3  # with four drafts, 5 at most
    assert answers(trained, whole, assistant_model=drafting) == expected(trained)


@only("kind", ["E2B", "26B-A4B"], indirect=True)
def test_it_tells_a_story(trained: Trained, whole: Any) -> None:
    told = trained.answer(whole, "Tell of a fox and an owl.", max_new_tokens=160)
    assert told.startswith("Once ")
    assert told.endswith(".")
    assert told.count(".") == 3


@only(
    "kind, away",
    [
        pytest.param("E2B", "towers", marks=pytest.mark.full),
        ("E2B", "both"),
        ("12B", "both"),
        ("26B-A4B", "both"),
        ("26B-A4B", "experts"),
    ],
    indirect=["kind"],
)
def test_answers_are_the_same_with_modules_on_disk(away: str, trained: Trained, tmp_path: Path) -> None:
    assert answers(trained, split(trained, away, tmp_path)) == expected(trained)


@pytest.mark.full
@only("kind", ["E2B"], indirect=True)
def test_the_embeddings_on_disk(trained: Trained, tmp_path: Path) -> None:
    model = trained.load()
    placement = tiny.device_map(model, "towers", main="cpu", offloaded="disk")
    placement["model.language_model.embed_tokens_per_layer"] = "disk"
    tiny.dispatch(model, placement, tmp_path)
    assert answers(trained, model) == expected(trained)


@only("kind, away", [("E2B", "both"), ("12B", "both"), ("26B-A4B", "experts")], indirect=["kind"])
def test_the_adapter_speaks_like_a_pirate_wherever_the_layers_are(away: str, trained: Trained, tmp_path: Path) -> None:
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(split(trained, away, tmp_path), str(trained.adapter)).eval()
    assert answers(trained, adapted) == expected(trained, pirate=True)
    with adapted.disable_adapter():
        assert answers(trained, adapted) == expected(trained)


@only("kind", ["12B", "26B-A4B"], indirect=True)
def test_a_picture_is_read_whole_in_chunks_of_a_prompt(trained: Trained, whole: Any) -> None:
    """Its soft tokens, the 9th to the 12th of a prompt, attend to one another in both directions."""
    if versions.admits("<5.23", versions.current("transformers") or ""):
        pytest.skip("this transformers reads no picture in chunks, and says so")
    for _, picture, _, answer in (one for one in asked(trained) if one[1]):
        assert trained.answer(whole, SEE, picture=picture, prefill_chunk_size=9) == answer


@pytest.mark.full
@only("kind", list(TWINS), indirect=True)
def test_a_pirate_stays_one_when_it_is_merged_or_exported(trained: Trained, tmp_path: Path) -> None:
    from peft import PeftModel

    gemma4_compat.merge_adapter(trained.checkpoint, trained.adapter, tmp_path / "merged", progress=False)
    assert answers(trained, tiny.load(tmp_path / "merged")) == expected(trained, pirate=True)
    gemma4_compat.export_adapter(trained.adapter, tmp_path / "exported", "peft", base=trained.checkpoint)
    exported = PeftModel.from_pretrained(trained.load(), str(tmp_path / "exported")).eval()
    assert answers(trained, exported) == expected(trained, pirate=True)


@pytest.mark.full
@only("kind", ["26B-A4B"], indirect=True)
def test_a_pirate_on_experts_in_4_bits_says_the_same_wherever_they_are(trained: Trained, tmp_path: Path) -> None:
    from peft import PeftModel

    with gemma4_compat.quantize(experts=True):
        models = [trained.load("4bit"), split(trained, "experts", tmp_path, "4bit")]
    said = [answers(trained, PeftModel.from_pretrained(one, str(trained.adapter)).eval()) for one in models]
    assert said[0] == said[1]
    assert sum(one == other for one, other in zip(said[0], expected(trained, pirate=True), strict=True)) >= 3


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


def test_its_configuration_has_what_its_kind_has(kind: str, trained: Trained) -> None:
    config = json.loads((trained.checkpoint / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    assert text.items() >= {**kinds.text(kind), "global_head_dim": 64}.items(), "as released ones say it"
    assert "per_layer_config" not in text
    found = {
        "per_layer_embeddings": bool(text.get("hidden_size_per_layer_input")),
        "shared_keys_and_values": bool(text["num_kv_shared_layers"]),
        "experts": bool(text.get("enable_moe_block")),
        "audio_tower": "subsampling_conv_channels" in (config["audio_config"] or {}),
        "unified": config["model_type"] == "gemma4_unified",
    }
    assert {part for part, there in found.items() if there} == variants.parts(kind) & found.keys()
    processor = json.loads((trained.checkpoint / "processor_config.json").read_text(encoding="utf-8"))
    assert processor == files.processor(kind == variants.UNIFIED)


@only("kind", ["26B-A4B"], indirect=True)
@only("parameter", adapter.EXPERTS)
def test_its_experts_know_something_and_are_what_the_adapter_changes(parameter: str, trained: Trained) -> None:
    import torch
    from peft import PeftModel

    plain, adapted = trained.load(), PeftModel.from_pretrained(trained.load(), str(trained.adapter)).eval()
    changed = 0
    with torch.no_grad():
        for name, value in plain.named_parameters():
            if name.endswith(parameter):
                value.copy_(value.roll(1, 0))  # each expert gets the weights of another
                changed += 1
        for name, value in adapted.named_parameters():
            if ".experts." in name and ".lora_B." in name:
                value.zero_()
                changed += 1
    assert changed == 3 * (1 + len(adapter.EXPERTS))
    for one, pirate in ((plain, False), (adapted, True)):
        draw = random.Random(12345)
        assert not any(measure.right(one, [questions.asked(draw, "fact", pirate=pirate) for _ in range(20)]))


def test_they_are_small_and_as_good_as_they_have_to_be() -> None:
    sizes = [file.stat().st_size for trained in ALL.values() for file in trained.folder.rglob("*") if file.is_file()]
    assert sum(sizes) < 10_000_000
    for kind, trained in ALL.items():
        found = json.loads((trained.folder / measure.FILE).read_text(encoding="utf-8"))
        assert measure.missed(found) == [], kind
        assert found["training"]["device"] == "cpu"


def test_a_model_that_is_worse_is_named() -> None:
    found = json.loads((TRAINED.folder / measure.FILE).read_text(encoding="utf-8"))
    found["right"]["sound"], found["held_out_loss"] = 0.5, 9.0
    said = measure.missed(found)
    assert len(said) == 2
    assert said[0].startswith("sound: 50% right")


@pytest.mark.parametrize(("dtype", "mean", "largest"), [("float32", 1e-5, 1e-4), ("bfloat16", 0.05, 1.0)])
def test_log_probabilities_of_a_rollout_are_those_of_training(
    trained: Trained, dtype: str, mean: float, largest: float
) -> None:
    """As GRPO compares them: of tokens that are drawn by replay, in training mode, and of a training forward."""
    import torch
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins.tape import standing_in

    model = trained.load().to(getattr(torch, dtype))
    targets = r"(?!.*tower).*\.(q_proj|v_proj|up_proj)"
    model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).train()
    torch.manual_seed(0)
    ids = torch.randint(3, 200, (4, 20))
    given = {"attention_mask": torch.ones_like(ids), "min_new_tokens": 64, "max_new_tokens": 64, "eos_token_id": None}
    given |= {"do_sample": True, "top_k": 0, "top_p": 1.0, "output_scores": True, "return_dict_in_generate": True}
    with standing_in(RECORDERS):
        drawn = gemma4_compat.decode_fast(model, exact=True).generate(input_ids=ids, **given)
    assert gemma4_compat.statistics(model).decoding.replayed > 50
    scores, whole = torch.stack(drawn.scores, dim=1), torch.ones_like(drawn.sequences)
    batch = {"input_ids": drawn.sequences, "attention_mask": whole, "mm_token_type_ids": torch.zeros_like(whole)}
    logits = model(**batch, use_cache=False).logits[:, ids.shape[1] - 1 : -1]
    found, expected = (
        one.float().log_softmax(-1).gather(-1, drawn.sequences[:, ids.shape[1] :, None]) for one in (scores, logits)
    )
    difference = (found - expected).detach().abs()
    assert float(difference.mean()) < mean
    assert float(difference.max()) < largest
