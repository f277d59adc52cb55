"""transformers-generate-embeddings: ``generate`` of ``inputs_embeds``, in each of the ways that take ``input_ids``."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_generate_embeddings import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ValueError: You passed `inputs_embeds` to `.generate\(\)`, but the model class Gemma4"


def load(workspace: Any, variant: str, width: int = 96) -> Any:
    if variant == variants.UNIFIED:
        pytest.importorskip("transformers.models.gemma4_unified")
    folder = workspace.cached(tiny_models.build_checkpoint, variant=variant, width=width)
    return tiny.load(folder, device=workspace.main)


def both(model: Any, batch: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """The answers to ``batch``, and to its embeddings."""
    import torch

    options = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "suppress_tokens": [250, 251, 252],
    } | options
    options |= {"return_dict_in_generate": True, "output_logits": True}
    others = {name: value for name, value in batch.items() if name != "input_ids"}
    embeds = model.get_input_embeddings()(batch["input_ids"])
    with torch.no_grad():
        return model.generate(**batch, **options), model.generate(inputs_embeds=embeds, **others, **options)


def assert_same(model: Any, batch: dict[str, Any], **options: Any) -> None:
    import torch

    expected, found = both(model, batch, **options)
    assert torch.equal(expected.sequences[:, batch["input_ids"].shape[1] :], found.sequences)
    assert all(map(torch.equal, expected.logits, found.logits))


@pytest.mark.parametrize("variant", variants.NAMES)
@pytest.mark.parametrize("text_only", [False, True])
def test_the_answer_is_that_of_the_tokens(workspace: Any, variant: str, text_only: bool) -> None:
    model = load(workspace, variant)
    assert_same(model, tiny.inputs(model.device, text_only=text_only, variant=variant))


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2, "num_return_sequences": 2}, {"cache_implementation": "static"}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("variant", ["E2B", "12B", "31B"])
def test_options_of_generate(workspace: Any, variant: str, options: dict[str, Any]) -> None:
    model = load(workspace, variant)
    assert_same(model, tiny.inputs(model.device, text_only=True, variant=variant), **options)


def test_beams_of_prompts_with_several_media(workspace: Any) -> None:
    model = load(workspace, "E2B")
    assert_same(model, tiny.several_media(tiny.inputs(model.device)), num_beams=2)


def test_a_batch_with_padding(workspace: Any) -> None:
    model = load(workspace, "E2B")
    ids = tiny.inputs(model.device, text_only=True)["input_ids"].repeat(2, 1)
    mask = ids.new_ones(ids.shape)
    ids[1, :5], mask[1, :5] = model.config.text_config.pad_token_id, 0
    assert_same(model, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize("offload", ["layers", "both"])
def test_a_split_model_with_an_adapter(workspace: Any, offload: str) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split(offload=offload), workspace.adapter("all")).eval()
    assert_same(model, workspace.inputs())


def test_the_text_model_by_itself(workspace: Any) -> None:
    assert_same(workspace.load_text(), workspace.inputs(text_only=True))
