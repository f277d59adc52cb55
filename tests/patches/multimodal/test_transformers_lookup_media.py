"""transformers-lookup-media: prompt lookup and draft models beside images and sounds."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import assistants, tiny, tiny_models
from gemma4_compat.patches.multimodal.transformers_lookup_media import PATCH, candidates
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ValueError: Image features and image tokens do not match, tokens: 7, features: 4"
    exact = False  # tokens are compared


@pytest.mark.parametrize("variant", [None, variants.UNIFIED])
@pytest.mark.parametrize("place", [3, 11])  # before the image and before the sound
@pytest.mark.parametrize("fast", [False, True])
def test_a_prompt_that_ends_as_what_stands_before_an_image(
    workspace: Any, variant: str | None, place: int, fast: bool
) -> None:
    import gemma4_compat

    model = workspace.load()
    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified")
        model = tiny.load(workspace.cached(tiny_models.build_checkpoint, variant=variant), device=workspace.main)
    model = model.float()
    if fast:
        gemma4_compat.decode_fast(model, assistants=True)
    batch = tiny.inputs(model.device, variant=variant)
    batch["input_ids"][0, -1] = batch["input_ids"][0, place]
    options = {"max_new_tokens": 12, "do_sample": False}
    assert model.generate(**batch, **options, prompt_lookup_num_tokens=3).equal(model.generate(**batch, **options))


@pytest.fixture(params=[None, variants.UNIFIED])
def models(request: Any, workspace: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A model, one of the same class that drafts for it, and a prompt with an image and a sound."""
    if request.param is None:
        made = [workspace.load().float() for _ in range(2)]
    else:
        pytest.importorskip("transformers.models.gemma4_unified")
        folder = workspace.cached(tiny_models.build_checkpoint, variant=request.param)
        made = [tiny.load(folder, device=workspace.main).float() for _ in range(2)]
    return made[0], made[1], tiny.inputs(workspace.main, variant=request.param)


def one_token(model: Any, token: int) -> Any:
    """Logits, (vocabulary,), of which ``token`` is the likeliest."""
    import torch

    return torch.zeros(model.config.get_text_config().vocab_size).index_fill(0, torch.tensor(token), 20.0)


@pytest.mark.parametrize("name", ["image_token_id", "video_token_id", "audio_token_id"])
@pytest.mark.parametrize("fast", [False, True])
def test_a_draft_model_that_wants_a_place_everywhere(models: Any, name: str, fast: bool) -> None:
    import gemma4_compat

    model, drafter, batch = models
    if fast:
        gemma4_compat.decode_fast(model, assistants=True)
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**batch, **options)
    assistants.head_says(drafter, one_token(model, getattr(model.config, name)))
    assert model.generate(**batch, **options, assistant_model=drafter).equal(expected)


def test_without_the_patch_it_is_an_error(models: Any) -> None:
    import gemma4_compat

    model, drafter, batch = models
    assistants.head_says(drafter, one_token(model, model.config.image_token_id))
    # The other one refuses drafted places of images before upstream counts them, where images are read both ways.
    for name in (PATCH.id, "transformers-image-types"):
        gemma4_compat.revert(name)
    try:
        with pytest.raises(ValueError, match="Image features and image tokens do not match"):
            model.generate(**batch, max_new_tokens=10, do_sample=False, assistant_model=drafter)
    finally:
        gemma4_compat.install()


@pytest.mark.parametrize("drafts", ["lookup", "model", "assistant"])
def test_a_model_that_says_places_itself(workspace: Any, drafts: str) -> None:
    import torch

    model, given = workspace.load().float(), {"prompt_lookup_num_tokens": 3}
    if drafts == "model":
        given = {"assistant_model": workspace.load().float()}
    elif drafts == "assistant":
        try:
            given = {"assistant_model": workspace.load_assistant().float()}
        except ImportError as error:
            pytest.skip(str(error))
    logits = one_token(model, model.config.image_token_id)

    def every_third(ids: Any, scores: Any) -> Any:
        return logits.expand_as(scores).to(scores) if ids.shape[1] % 3 == 0 else scores

    options = {"max_new_tokens": 12, "do_sample": False, "logits_processor": [every_third]}
    expected = model.generate(**workspace.inputs(), **options)
    assert (torch.tensor(expected[0, -12:].tolist()) == model.config.image_token_id).sum() == 4
    assert model.generate(**workspace.inputs(), **options, **given).equal(expected)


def test_a_draft_model_with_another_tokenizer(workspace: Any) -> None:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    model, drafter = workspace.load().float(), workspace.load().float()
    size = model.config.get_text_config().vocab_size
    drafter.resize_token_embeddings(size + 1)  # transformers tells tokenizers apart by it
    words = {f"w{number}": number for number in range(size)}
    named = dict.fromkeys(("target", "drafter"))
    for name, more in (("target", {}), ("drafter", {"other": size})):
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | more, unk_token="w3"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        named[name] = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w3", pad_token="w0")
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = model.generate(**workspace.inputs(), **options)
    assistants.head_says(drafter, one_token(drafter, model.config.image_token_id))
    options |= {"tokenizer": named["target"], "assistant_tokenizer": named["drafter"]}
    assert model.generate(**workspace.inputs(), **options, assistant_model=drafter).equal(expected)


@pytest.mark.parametrize("name", ["image_token_id", None])
def test_sampling_with_a_draft_model(workspace: Any, name: str | None) -> None:
    """Tokens of a model that is sure, drawn with logits of drafts that were cut off, in part or as a whole."""
    import torch

    model, drafter = workspace.load().float(), workspace.load().float()
    assistants.head_says(model, one_token(model, 9) * 2)
    logits = one_token(model, 9)
    if name is not None:
        logits[getattr(model.config, name)] = 20.0  # as likely: drafts end at each place
    assistants.head_says(drafter, logits)
    torch.manual_seed(0)
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0}
    found = model.generate(**workspace.inputs(), **options, assistant_model=drafter)
    assert found[0, -12:].tolist() == [9] * 12


def test_the_number_of_drafts_is_kept_for_the_next_call(workspace: Any) -> None:
    model, drafter = workspace.load().float(), workspace.load().float()
    settings = drafter.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 2, "heuristic"
    batch = workspace.inputs(text_only=True)
    model.generate(**batch, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert drafter.generation_config.num_assistant_tokens > 2, "all were right: two more in each round"


def test_drafts_end_before_a_place_and_others_are_kept() -> None:
    import torch

    text = torch.tensor([[5, 9, 5]])  # with a place in the prompt itself
    for drafts, kept in (([1, 2], 2), ([1, 9, 2], 1), ([9], 0), ([], 0)):
        found = torch.tensor([[*text[0].tolist(), *drafts]])
        for scores in (None, torch.rand(1, len(drafts), 10)):
            given, logits = candidates(lambda _ids, result=(found, scores): result, {9}, text)
            assert given.tolist() == [[5, 9, 5, *drafts[:kept]]]
            assert (logits is None) if scores is None or not kept else logits.equal(scores[:, :kept])
