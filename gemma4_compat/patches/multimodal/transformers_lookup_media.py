"""Neither prompt lookup nor a draft model drafts places of images, videos and sounds.

Symptom: ``ValueError: Image features and image tokens do not match, tokens: 7, features: 4``, or audio features
and tokens, from ``generate`` with ``prompt_lookup_num_tokens=`` or ``assistant_model=``, and a prompt that has an
image or a sound.

Cause: ``PromptLookupCandidateGenerator`` drafts what followed the last tokens where they stood before. Where that is
an image (in the chat template, a line break stands before it and at the end of the prompt), it drafts image tokens,
and the first forward reads them together with the prompt and its features, which are too few. A draft model, such as
the E2B for the 31B, may draft any token, also before that forward. A ``gemma4_assistant`` drafts after it.

Fix: For Gemma 4, drafts end before the first such token. The text is the same: drafts only say what is tried.

Remove when: ``_assisted_decoding`` leaves out drafts that stand for features.
"""

from collections.abc import Callable, Collection
from typing import Any

from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F111", severity="crash", affected=">=5.5.0", after="transformers-assistant-sampling")

#: Attributes of a configuration: tokens that stand for features.
_PLACES = ("image_token_id", "video_token_id", "audio_token_id")


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._get_candidate_generator")
def candidate_generator(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    generator = original(self, *args, **kwargs)
    # Drafts after the model's outputs are not read together with features.
    if getattr(generator, "requires_model_outputs", False) or not is_gemma4_config(self.config):
        return generator
    places = {place for name in _PLACES if (place := getattr(self.config, name, None)) is not None}
    return _Generator(generator, places) if places else generator


class _Generator(Proxy):
    """A ``CandidateGenerator``, whatever its class, that drafts no places of features."""

    def __init__(self, generator: Any, places: Collection[int]) -> None:
        super().__init__(generator)
        self._self_places = places

    def get_candidates(self, input_ids: Any) -> tuple[Any, Any]:
        return candidates(self.__wrapped__.get_candidates, self._self_places, input_ids)


def candidates(get: Callable[..., Any], places: Collection[int], input_ids: Any) -> tuple[Any, Any]:
    """What ``get`` drafts, up to the first token of ``places``.

    Args:
        get: ``CandidateGenerator.get_candidates``.
        places: token ids.
        input_ids: the text, int64 of shape (1, length).

    Returns:
        the text and drafts, (1, length + drafts), and the drafts' logits, (1, drafts, vocabulary), or None.
    """
    found, logits = get(input_ids)
    drafts = found[0, input_ids.shape[1] :].tolist()
    right = next((count for count, token in enumerate(drafts) if token in places), len(drafts))
    # Without a draft None, as upstream: with logits it reads `ids[:, -0:]`, which is the whole text.
    return found[:, : input_ids.shape[1] + right], None if logits is None or not right else logits[:, :right]


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import assistants

    model, drafter = workspace.load().float(), workspace.load().float()
    batch, place = workspace.inputs(), model.config.image_token_id
    ids = batch["input_ids"]
    ids[0, -1] = ids[0, int((ids[0] == place).nonzero()[0]) - 1]  # what stands before the image
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**batch, **options)
    found = model.generate(**batch, **options, prompt_lookup_num_tokens=3)
    if not found.equal(expected):
        return Outcome(True, "prompt lookup after an image gives other tokens")
    likely = torch.full((model.config.get_text_config().vocab_size,), -1e4)
    likely[place] = 0
    assistants.head_says(drafter, likely)
    drafter.generation_config.num_assistant_tokens = 1  # 5.16 cannot draft a second one past the sliding window
    found = model.generate(**batch, **options, assistant_model=drafter)
    same = found.equal(expected)
    return Outcome(not same, f"prompt lookup and drafts of images give {'the same' if same else 'other'} tokens")
