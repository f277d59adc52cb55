"""Prompts with images and sounds after ``decode_fast``: towers run, what the text model does of them is replayed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import variants
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.statistics import Cause
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from tests.unit.generation import calls
from tests.unit.generation.calls import (
    EAGER,
    PLACES,
    WINDOW,
    Models,
    assert_equal,
    fast,
    generate,
    layers,
    other_media,
    steps,
    text,
)
from tests.unit.offload import threads

pytestmark = pytest.mark.usefixtures("tapes")
VERSION = versions.installed("transformers") or "0"


def counts(model: Any) -> tuple[int, int]:
    found = steps(model)
    return found.prompts_captured, found.prompts_replayed


def same(model: Any, batches: list[dict[str, Any]], **options: Any) -> list[Any]:
    """Their answers, with the bits of calls that replay nothing."""
    found = [generate(model, batch, **options) for batch in batches]
    before = counts(model)
    expected = [generate(model, batch, **options, **EAGER) for batch in batches]
    assert counts(model) == before
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    return found


@pytest.mark.parametrize(("quantization", "adapter", "where"), PLACES)
def test_other_media_by_one_graph(models: Models, quantization: str | None, adapter: str | None, where: str) -> None:
    model = fast(models, quantization, adapter, where)
    found = same(model, [other_media(models.workspace.inputs(), seed) for seed in range(4)])
    assert counts(model) == (1, 3)
    assert steps(model).reasons == ()
    assert Cause.CODE not in steps(model).recaptures  # the hooks of a model that is running are no change
    assert not found[2].logits[0].equal(found[3].logits[0])


@pytest.mark.parametrize("variant", ["12B", pytest.param("26B-A4B", marks=pytest.mark.full), "31B"])
def test_images_seen_both_ways(models: Models, variant: str) -> None:
    """An image longer than the window, and a padded batch."""
    import transformers

    if variant == variants.UNIFIED and not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no gemma4_unified")
    model = tiny.load(models.workspace.cached(tiny_models.build_checkpoint, variant=variant))
    gemma4_compat.decode_fast(model, exact=True)
    batch = tiny.inputs(variant=variant)
    same(model, [other_media(batch, seed) for seed in range(3)])
    assert counts(model) == (1, 2)
    several = tiny.several_media(batch)
    several["attention_mask"][1, :3] = several["input_ids"][1, :3] = 0
    same(model, [other_media(several, seed) for seed in range(3)])
    assert counts(model)[1] >= 4
    if versions.admits(">=5.23", VERSION):
        cut = tiny.without(batch, "input_features") if "input_features" in batch else batch
        same(model, [other_media(cut, seed) for seed in range(3)], prefill_chunk_size=9)
        assert counts(model)[1] >= 9
    assert steps(model).reasons == ()
    types = batch["mm_token_type_ids"].clone()
    types[:, :2] = 1  # as if the text began with an image
    found = generate(model, batch | {"mm_token_type_ids": types})
    assert not found.logits[0].equal(generate(model, batch).logits[0])  # masks of images are another input


def test_rows_with_padding_beams_and_sampling(models: Models) -> None:
    model = fast(models, None)
    batch = tiny.several_media(models.workspace.inputs())
    batch["attention_mask"][1, :3] = batch["input_ids"][1, :3] = 0
    same(model, [other_media(batch, seed) for seed in range(3)])
    assert counts(model) == (1, 2)
    for options in ({"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}):
        same(model, [other_media(batch, seed) for seed in range(3)], **options)
    assert counts(model)[1] >= 6


def test_chunks(models: Models) -> None:
    if versions.admits("<5.23", VERSION):
        pytest.skip("this transformers does not cut prompts with images")
    model, size = fast(models, None), WINDOW - 2
    batch = tiny.without(models.workspace.inputs(), "input_features")
    same(model, [other_media(batch, seed) for seed in range(3)], prefill_chunk_size=size)
    captured, replayed = counts(model)
    assert replayed >= 2 * -(-24 // size)
    generate(model, other_media(batch, 3), prefill_chunk_size=size)
    assert counts(model) == (captured, replayed + -(-24 // size))


def test_a_video(models: Models) -> None:
    if versions.admits("<5.24", VERSION):
        pytest.skip("other inputs of videos")
    import torch

    model = fast(models, None)
    batch = tiny.without(models.workspace.inputs(), "input_features")
    video = {"pixel_values_videos": batch.pop("pixel_values"), "video_position_ids": batch.pop("image_position_ids")}
    batch |= {**video, "num_frames_per_video": torch.tensor([1])}
    batch["input_ids"][batch["input_ids"] == tiny_configs.IMAGE_TOKEN] = model.config.video_token_id
    batch["mm_token_type_ids"][batch["mm_token_type_ids"] == 1] = 2
    found = same(model, [batch | {"pixel_values_videos": video["pixel_values_videos"] * seed} for seed in range(3)])
    assert counts(model) == (1, 2)
    assert not found[1].logits[0].equal(found[2].logits[0])


def test_given_embeddings(models: Models) -> None:
    model = fast(models, None)
    batches = [text(model, 9, seed=seed) for seed in range(3)]
    for batch in batches:
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    same(model, batches)
    assert counts(model) == (1, 2)


def test_the_text_only_class_searches_its_embeddings(models: Models) -> None:
    """Which no capture permits: its prompts of text are captured all the same."""
    checkpoint = models.workspace.cached(models.workspace._text_copy)
    model = tiny.load(checkpoint, cls=tiny_models.class_name(checkpoint, text_only=True))
    gemma4_compat.decode_fast(model, exact=True)
    batches = [text(model, 9, seed=seed) for seed in range(3)]
    embed = model.get_input_embeddings()
    given = [batch | {"inputs_embeds": embed(batch["input_ids"]).detach()} for batch in batches]
    same(model, [{name: value for name, value in batch.items() if name != "input_ids"} for batch in given])
    assert counts(model) == (0, 0)
    same(model, batches)
    assert counts(model) == (1, 2)
    assert steps(model).reasons == ()


def test_turns_on_one_cache_of_the_user(models: Models) -> None:
    """The second turn finds windows that are full, and has a picture as well."""
    import torch

    model, batch = fast(models, None), models.workspace.inputs()

    def turns(way: dict[str, Any]) -> list[Any]:
        cache = calls.static_cache(model, 96)
        first = generate(model, batch, way, past_key_values=cache)
        ids = torch.cat([first.sequences, batch["input_ids"]], dim=-1)
        kinds = torch.nn.functional.pad(batch["mm_token_type_ids"], (first.sequences.shape[1], 0))
        second = other_media(batch, 5) | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        second["mm_token_type_ids"] = kinds
        return [first, generate(model, second, way, past_key_values=cache)]

    expected = turns(EAGER)
    for _ in range(3):
        for one, other in zip(turns({}), expected, strict=True):
            assert_equal(one, other)
    assert counts(model)[1] >= 2
    assert steps(model).reasons == ()


def test_what_runs_in_a_replay(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Towers do, and layers do not."""
    model, batch, runs = fast(models, None), models.workspace.inputs(), []
    both = [type(module.mlp) for module in (model.model.vision_tower.encoder.layers[0], layers(model)[0])]
    for kind in both:

        def noted(self: Any, states: Any, original: Any = kind.forward) -> Any:
            runs.append(type(self))
            return original(self, states)

        monkeypatch.setattr(kind, "forward", noted)
    for seed in range(4):
        runs.clear()
        generate(model, other_media(batch, seed), new=1)
    assert set(runs) == {both[0]}


def test_a_change_is_noticed(models: Models) -> None:
    """That of a tower needs no new graph."""
    model, batch = fast(models, None), models.workspace.inputs()
    before = same(model, [batch] * 3)[-1]

    def a_tower() -> None:
        norm = model.model.vision_tower.encoder.layers[0].input_layernorm
        norm.weight.data = -norm.weight.data

    changes = {
        a_tower: 1,
        lambda: model.model.embed_audio.embedding_projection.weight.data.mul_(-1): 1,
        lambda: calls.CHANGES["new parameter"](model): 2,
    }
    for change, captured in changes.items():
        change()
        found = same(model, [batch] * 3)[-1]
        assert not found.logits[0].equal(before.logits[0])
        assert counts(model)[0] == captured
        before = found


def test_adapters_keep_their_graphs(models: Models) -> None:
    model, batch = models.fresh(None, "all"), models.workspace.inputs()
    model.load_adapter(models.workspace.adapter("all"), "second")
    model.eval()
    gemma4_compat.decode_fast(model, exact=True)
    for _ in range(3):
        for name in ("default", "second"):
            model.set_adapter(name)
            same(model, [batch])
    assert counts(model)[1] == 4


def test_custom_kernels(models: Models) -> None:
    model = fast(models, None, exact=False)
    same(model, [other_media(models.workspace.inputs(), seed) for seed in range(3)])
    assert counts(model) == (1, 2)


def test_nothing_is_captured_where_memory_is_short(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = fast(models, None), models.workspace.inputs()
    same(model, [batch] * 3)
    monkeypatch.setattr(prompts, "has_room", lambda *_, **__: False)
    same(model, [batch])
    assert counts(model) == (1, 3)  # what is there is replayed
    same(model, [tiny.several_media(batch)] * 3)
    assert counts(model) == (1, 3)
    assert not any(decoder.of(model).prompts.graphs())


def test_a_tower_that_runs_out_of_memory_gets_that_of_graphs(models: Models) -> None:
    import torch

    model, batch = fast(models, None), models.workspace.inputs()
    same(model, [batch] * 3)
    wanting: list[int] = [1]

    def allocates(_module: Any, _inputs: Any) -> None:
        if wanting:
            wanting.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.vision_tower.register_forward_pre_hook(allocates)
    if versions.admits("<5.20", VERSION):  # or generate calls the tower itself, before it reads the prompt
        same(model, [batch])
        assert not wanting
        assert counts(model) == (1, 2)
    wanting.clear()
    same(model, [batch] * 3)


def test_threads(models: Models) -> None:
    model, batch = fast(models, None, None, "streamed"), models.workspace.inputs()

    def answer(seed: int, way: dict[str, Any]) -> Any:
        return generate(model, other_media(batch, seed), way, past_key_values=calls.static_cache(model, 32))

    expected = [answer(seed, EAGER) for seed in range(2)]

    def work(seed: int) -> None:
        for _ in range(4):
            assert_equal(answer(seed, {}), expected[seed])

    raised = threads.run_together([lambda seed=seed: work(seed) for seed in range(2)], limit=100)
    assert raised == [None, None]
    assert steps(model).reasons == ()
