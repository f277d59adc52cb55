"""With ``adapter_names``, images, videos and sounds are encoded with the adapter of their row.

Symptom: silent: with an adapter in a tower, an embedder or a projection of images, videos or sounds, and PEFT's
``adapter_names``, rows are answered with another row's adapter if there are as many images as rows; otherwise
``ValueError: Length of `adapter_names` should be the same as the number of inputs, but got 2 and 3 respectively``.
The latter also with ``num_return_sequences``, or with beams from a generation config.

Cause: PEFT gives every adapted layer one name for each row of the batch. A tower's batch is images, and a projection
gets the tokens of all of them in one dimension.

Fix: The placeholders of each row say which images are its own. Those of each adapter are encoded by themselves. A
batch whose media are not those of whole rows is an error.

Remove when: PEFT and transformers encode the media of each row with its adapter.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from gemma4_compat._gemma4.adapters import rows
from gemma4_compat._gemma4.models import media
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F119", severity="wrong_result", affected=">=5.5.0", requires="peft>=0.18.0", needs="peft-adapter-names")

#: Arguments with a row for each item: those that are encoded, and those that say how many tokens each becomes.
_ARGUMENTS = {
    "image": ("pixel_values", "image_position_ids"),
    "video": ("pixel_values_videos", "video_position_ids"),
    "audio": ("input_features", "input_features_mask"),
}
_FRAMES = "num_frames_per_video"


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._expand_inputs_for_generation")
def expand_inputs(original: Original, *args: Any, **kwargs: Any) -> Any:
    call = rows.current()
    if call is not None:
        call.times = kwargs.get("expand_size", 1)
    return original(*args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.get_image_features", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedModel.get_image_features", group="unified")
def image_features(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return _encode("image", original, self, args, kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.get_video_features", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedModel.get_video_features", group="unified")
def video_features(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return _encode("video", original, self, args, kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.get_audio_features", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedModel.get_audio_features", group="unified")
def audio_features(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return _encode("audio", original, self, args, kwargs)


def _encode(kind: str, original: Original, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = rows.current()
    if call is not None and call.alone is None:
        call.check_padding(model)
    if call is None or call.alone is not None or not _is_adapted(call, model, kind):
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    options = given.pop("kwargs", {})
    del given["self"]
    last = given.get(_ARGUMENTS[kind][1])
    if last is None:
        return original(model, *args, **kwargs)
    sizes = media.sizes(model, kind, last)
    frames = given.get(_FRAMES)
    names = call.owners(model, kind, sizes)

    def run(places: list[int]) -> Any:
        if len(places) == len(names):
            return original(model, **given, **options)
        own = {name: given[name][places] for name in _ARGUMENTS[kind]}
        if frames is not None:
            starts = frames.cumsum(0) - frames
            own[_FRAMES] = frames[[start in places for start in starts.tolist()]]
        return original(model, **{**given, **own}, **options)

    # What has a part for each video: of frames that come one after another, those of a video are next to each other.
    return rows.by_adapter(call, names, run, lambda parts, places: _join(parts, places, sizes, frames))


def _is_adapted(call: rows.Call, model: Any, kind: str) -> bool:
    """Whether PEFT's hooks of this call are in the part that encodes ``kind``."""
    for name in (
        ("audio_tower", "embed_audio") if kind == "audio" else ("vision_tower", "embed_vision", "vision_embedder")
    ):
        part = getattr(model, name, None)
        for module in () if part is None else part.modules():
            for hook in module._forward_pre_hooks.values():
                if (getattr(hook, "keywords", None) or {}).get("adapter_names") is call.names:
                    return True
    return False


def _join(parts: Sequence[Any], places: list[list[int]], sizes: Sequence[int], frames: Any) -> Any:
    """The outputs of the items at ``places``, as if all had been encoded together."""
    found = parts[0]
    for key in list(vars(found)):  # older releases add some that are no fields
        values = [getattr(part, key) for part in parts]
        setattr(found, key, _join_value(values, places, sizes, frames, pooled=key == "pooler_output"))
    return found


def _join_value(values: list[Any], places: list[list[int]], sizes: Sequence[int], frames: Any, *, pooled: bool) -> Any:
    import torch

    if isinstance(values[0], torch.Tensor):
        if all(len(value) == len(own) for value, own in zip(values, places)):
            return rows.joined(values, places)
        counts = [[sizes[index] for index in own] for own in places]
        if any(len(value) != sum(own) for value, own in zip(values, counts)):
            return values[0]
        pieces = [piece for value, own in zip(values, counts) for piece in value.split(own)]
        order = [index for own in places for index in own]
        return torch.cat([piece for _, piece in sorted(zip(order, pieces), key=lambda entry: entry[0])])
    if not isinstance(values[0], (tuple, list)):
        return values[0]
    if not pooled:  # of each layer
        return type(values[0])(_join_value(list(of), places, sizes, frames, pooled=False) for of in zip(*values))
    starts = range(len(sizes)) if frames is None else (frames.cumsum(0) - frames).tolist()
    by_start = {
        start: piece
        for value, own in zip(values, places)
        for start, piece in zip([one for one in starts if one in own], value, strict=True)
    }
    return type(values[0])(by_start[start] for start in starts)


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import PeftModel

    from gemma4_compat._lab import tiny

    model = PeftModel.from_pretrained(workspace.load().float(), workspace.adapter("towers"), adapter_name="one")
    batch = tiny.several_media(workspace.inputs())
    number = len(batch["input_ids"])
    with torch.no_grad():
        expected = model(**batch).logits
        with model.disable_adapter():
            expected = torch.cat([model(**batch).logits[:1], expected[1:]])
        found = model(**batch, adapter_names=["__base__", *["one"] * (number - 1)]).logits
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    # In float32, because another batch size may round differently.
    return Outcome(off > 1e-4, f"with an adapter in the towers, the rows' logits are off by {off:.2g} of the largest")
