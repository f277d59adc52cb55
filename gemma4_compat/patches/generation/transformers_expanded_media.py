"""Each beam, and each returned sequence, gets the media of its own prompt.

Symptom: silent: with ``num_beams`` or ``num_return_sequences``, a prompt with several audio clips is answered as if it
had one of them several times, or those of another prompt. Before 5.19.0, images and several videos in a prompt are
mixed up the same way.

Cause: ``GenerationMixin._expand_inputs_for_generation`` repeats each row of a tensor in place: [a, b] becomes [a, a,
b, b]. Rows of media are not rows of the batch. A prompt has any number of them, and its copies need all of them one
after another: [a, b, a, b]. From 5.19.0 on this is right for images and videos, which are encoded before.

Fix: The media of each prompt are repeated together; its placeholders say how many there are.

Remove when: transformers repeats the audio clips of each prompt together in all supported releases.
"""

import inspect
import itertools
from contextvars import ContextVar
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.models import media
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F88", severity="wrong_result", affected=">=5.5.0")

#: The model whose ``generate`` runs, because before 5.18.0 it calls a static method.
_generating: ContextVar[Any] = ContextVar("gemma4_compat_generating", default=None)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin.generate")
def generate(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    with in_place.bound(_generating, self):
        return original(self, *args, **kwargs)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._expand_inputs_for_generation")
def expand_inputs(original: Original, *args: Any, **kwargs: Any) -> Any:
    model = args[0] if args and hasattr(args[0], "config") else _generating.get()
    if model is None or not is_gemma4_config(model.config):
        return original(*args, **kwargs)
    if kwargs.get("expand_size") == 1:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    times, repeated = given.get("expand_size", 1), {}
    if times > 1:
        repeated = _repeat_media(model, times, given.get("input_ids"), given.get("model_kwargs", {}))
    input_ids, expanded = original(*args, **{name: value for name, value in kwargs.items() if name not in repeated})
    return input_ids, expanded | repeated


def _repeat_media(model: Any, times: int, input_ids: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with media, repeated; a kind whose items do not match the prompts' placeholders is left out."""
    encoded = dict(given.get("mm_encoder_outputs") or {})
    kinds = [kind for kind, names in media.MEDIA if kind in encoded or given.get(names[0]) is not None]
    if not kinds:
        return {}
    embeds = None if input_ids is not None and input_ids.numel() else given.get("inputs_embeds")
    masks = model.model.get_placeholder_mask(input_ids if embeds is None else None, embeds)
    found: dict[str, Any] = {}
    for (kind, names), mask in zip(media.MEDIA, masks):
        if kind not in kinds:
            continue
        if kind in encoded:
            sizes = [len(item) for item in encoded[kind].pooler_output]
        elif given.get(names[1]) is None:
            continue
        else:
            sizes = media.sizes(model, kind, given[names[1]])
        order = _order(sizes, mask.sum(-1).tolist(), times)
        if order is None:
            continue
        if kind in encoded:
            encoded[kind] = _reordered(encoded[kind], order)
            found["mm_encoder_outputs"] = encoded
        else:
            found |= {name: given[name][order] for name in names}
    return found


def _order(sizes: list[int], asked: list[int], times: int) -> list[int] | None:
    """The item at each place, with those of each prompt repeated ``times``; None if they do not match.

    Args:
        sizes: tokens of each item.
        asked: placeholders of each prompt.
        times: copies of each prompt.
    """
    ends = list(itertools.accumulate(sizes, initial=0))
    order: list[int] = []
    end = done = 0
    for count in asked:
        start, done = end, done + count
        while end < len(sizes) and ends[end] < done:
            end += 1
        if ends[end] != done:
            return None
        order += list(range(start, end)) * times
    return order if end == len(sizes) else None


def _reordered(encoded: Any, order: list[int]) -> Any:
    import torch

    items = [encoded.pooler_output[index] for index in order]
    whole = isinstance(encoded.pooler_output, torch.Tensor)
    return type(encoded)(**{**encoded, "pooler_output": torch.stack(items) if whole else items})


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny

    model = workspace.load().float()
    batch = tiny.several_media(workspace.inputs())
    found = {}
    for kind in ("image", "input_features"):
        if not any(name.startswith(kind) for name in batch):
            continue
        one = tiny.without(batch, "input_features" if kind == "image" else "image")
        expected, repeated = (
            model.generate(
                **one,
                max_new_tokens=1,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                num_beams=beams,
            ).logits[0]
            for beams in (1, 2)
        )
        difference = (repeated - expected.repeat_interleave(2, dim=0)).abs().max()
        # In float32, because another batch size may round differently.
        if not torch.isfinite(difference) or difference > 1e-4 * expected.abs().max():
            found["images" if kind == "image" else "sounds"] = difference.item()
    said = " and ".join(f"several {kind} in a prompt: the logits are off by {off:.2g}" for kind, off in found.items())
    return Outcome(
        bool(found), said or "beams of prompts with several images and sounds have the logits of the prompt"
    )
