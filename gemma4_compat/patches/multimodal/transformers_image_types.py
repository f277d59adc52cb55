"""The tokens of an image see each other without ``mm_token_type_ids`` as well (12B, 26B-A4B, 31B).

Symptom: silent: an image or a video without ``mm_token_type_ids`` gives other logits and gradients on the 12B, the
26B-A4B and the 31B than with them. Prompts built by hand lack them, and collators drop names they do not know. The
same happens with types that do not mark the image: all zero, shifted by padding, or counted from the last turn instead
of the beginning.

Cause: In these models the tokens of one image attend to each other in both directions. The forward knows its tokens by
their ids, but makes that mask only from ``mm_token_type_ids``, whose values it does not compare with the tokens.

Fix: Beside images and videos, missing types are those of the processor, which are no more than the ids of image, video
and audio tokens; with ``inputs_embeds`` the embeddings of those tokens. ``generate`` has them before it cuts a prompt
or makes a mask. Given types that leave neighbouring tokens of an image unmarked are refused with an error (not inside
``torch.compile``, which cannot read values). Prompts without images or videos, masks made by the caller, and E2B and
E4B, whose images are read from left to right, stay as they are. Only training steps of ``train_fast`` with
several texts in a row leave out types that mark no image: masks are the same without, and then need not be made.

Remove when: transformers derives the types of tokens from ``input_ids``.
"""

import inspect
from typing import Any

from gemma4_compat._engine import dormant, versions
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.cache import prefill as prefill_of
from gemma4_compat._gemma4.models import media
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F118", severity="wrong_result", affected=">=5.5.0", after="transformers-image-masks-unified")

_TYPES = "mm_token_type_ids"
_TEXT_TRAINING = "transformers-text-training"


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.forward", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedModel.forward", group="unified")
def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if args:
        names = list(inspect.signature(original).parameters)[1:]  # without self
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if media.has_pictures(kwargs) and _both_ways(self.config) and not isinstance(kwargs.get("attention_mask"), dict):
        ids, embeds, cache = kwargs.get("input_ids"), kwargs.get("inputs_embeds"), cache_names.cache_in(kwargs)
        if (ids is None) != (embeds is None):  # others are refused there
            held = 0 if cache is None else int(cache.get_seq_length())
            expected = media.token_types(self, ids, embeds, before=held)
            if kwargs.get(_TYPES) is None:
                kwargs[_TYPES] = expected
            else:
                _compare(kwargs[_TYPES], expected, held)
    elif (
        _TYPES in kwargs
        and self.training
        and _both_ways(self.config)
        and windows.are_texts(self.config.get_text_config(), kwargs, kwargs[_TYPES])
        and _may_lack_types()
    ):
        kwargs[_TYPES] = None
    return original(self, **kwargs)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prefill", group="generate")
def prefill(
    original: Original,
    self: Any,
    input_ids: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if (
        model_kwargs.get(_TYPES) is None
        and media.has_pictures(model_kwargs)
        and is_gemma4_config(self.config)
        and _both_ways(self.config)
    ):
        embeds, cache, before = model_kwargs.get("inputs_embeds"), cache_names.cache_in(model_kwargs), 0
        if embeds is None and cache is not None:
            read = prefill_of.new_tokens(input_ids, generation_config, model_kwargs)
            before = max(int(cache.get_seq_length()) + read - input_ids.shape[1], 0)
        model_kwargs[_TYPES] = media.token_types(self.model, input_ids, embeds, before=before)
    return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)


def _may_lack_types() -> bool:
    """Whether a training step without images needs no types."""
    return versions.admits(">=5.6", versions.current("transformers") or "") or dormant.is_installed(_TEXT_TRAINING)


def _both_ways(config: Any) -> bool:
    return getattr(config.get_text_config(), "use_bidirectional_attention", None) == "vision"


def _compare(given: Any, expected: Any, held: int) -> None:
    """Refuse types that leave neighbouring tokens of an image unmarked.

    Args:
        given: ``mm_token_type_ids``, from the beginning of the text; what they do not reach is text.
        expected: int64 [batch, held + tokens].
        held: how many tokens the cache holds.

    Raises:
        Gemma4CompatError: they do, or they have fewer rows.
    """
    import torch

    rows, length = expected.shape
    if given.ndim == 2 and len(given) >= rows:
        if torch.compiler.is_compiling() or given.is_meta or expected.is_meta:
            return
        reached = torch.nn.functional.pad(given[:rows].to(expected.device), (0, max(length - given.shape[1], 0)))
        if not bool((_neighbours(expected[:, held:]) & ~_neighbours(reached[:, held:length])).any()):
            return
    shown = "" if given.is_meta or bool(given.any()) else ", all zero,"
    raise Gemma4CompatError(
        f"mm_token_type_ids of shape {tuple(given.shape)}{shown} do not mark the image tokens of {rows} text(s) of "
        f"{length} tokens, of which the cache holds {held}. Leave mm_token_type_ids out, and they are derived from "
        "the tokens; or pass a row for each text and a column for each of its tokens, also of those in the cache: 1 "
        "where input_ids are config.image_token_id, 2 where they are config.video_token_id."
    )


def _neighbours(types: Any) -> Any:
    """Whether a token and the next one both belong to images or videos, bool [batch, tokens - 1]."""
    vision = (types == 1) | (types == 2)
    return vision[:, 1:] & vision[:, :-1]


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny

    if workspace.variant is None:
        models = {"31B": workspace.load_31b()}
        unified = workspace.unified()
        if unified is not None:
            models[variants.UNIFIED] = unified.load()
    else:
        models = {workspace.variant: workspace.load()}
    models = {name: model for name, model in models.items() if _both_ways(model.config)}
    off = {}
    for name, model in models.items():
        model = model.to(workspace.main).float()
        if workspace.variant is None:
            batch = tiny.inputs(workspace.main, variant=name if name == variants.UNIFIED else None)
        else:
            batch = workspace.inputs()
        without = {key: value for key, value in batch.items() if key != _TYPES}
        with torch.no_grad():
            off[name] = (model(**batch).logits - model(**without).logits).abs().max().item()
    if not off:
        return Outcome(False, "images are read from left to right by this model", applicable=False)
    worst = max(off.values())
    said = ", ".join(f"{value:.2g} on the {name}" for name, value in off.items())
    return Outcome(worst > 0, f"the logits of an image without mm_token_type_ids are off by {said}", worst)
