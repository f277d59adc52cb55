"""Images, videos and sounds among the inputs of a prompt. Imports nothing upstream."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: In the order of ``get_placeholder_mask``: the name once encoded -> the inputs with a row for each item.
MEDIA = (
    ("image", ("pixel_values", "image_position_ids")),
    ("video", ("pixel_values_videos", "video_position_ids")),
    ("audio", ("input_features", "input_features_mask")),
)
#: The same without videos, whose frames may be rows.
_IN_ROWS = tuple(entry for entry in MEDIA if entry[0] != "video")


def has_pictures(given: Mapping[str, Any]) -> bool:
    """Whether images or videos are among the arguments of a forward, encoded or not. Asked for each token."""
    for name in ("pixel_values", "pixel_values_videos"):
        if name in given and given[name] is not None:
            return True
    if "mm_encoder_outputs" not in given or not given["mm_encoder_outputs"]:
        return False
    encoded = given["mm_encoder_outputs"]
    return any(encoded.get(kind) is not None for kind, _ in MEDIA[:2])


def token_types(model: Any, ids: Any, embeds: Any = None, *, before: int = 0) -> Any:
    """The ``mm_token_type_ids`` that the processor returns: 1 for images, 2 for videos, 3 for sounds, 0 for text.

    Args:
        model: a ``Gemma4Model``, or the 12B's.
        ids: tokens, int64 [batch, tokens], or None.
        embeds: their embeddings, [batch, tokens, width], if there are no ids.
        before: tokens before them, which count as text.

    Returns:
        int64 [batch, before + tokens].
    """
    import torch

    masks = model.get_placeholder_mask(None if embeds is not None else ids, embeds)
    return torch.nn.functional.pad(sum(number * mask.long() for number, mask in enumerate(masks, 1)), (before, 0))


def sizes(model: Any, kind: str, last: Any) -> list[int]:
    """The number of tokens of each image, video or sound; ``last`` is its positions, or its audio mask."""
    unified = model.config.model_type.startswith("gemma4_unified")
    if kind == "audio":
        heard = last if unified else last[:, ::2][:, ::2]  # like the tower's two convolutions
        return list(heard.sum(-1).tolist())
    patches = (last != -1).all(-1).flatten(1).sum(-1)
    return list((patches if unified else patches // model.config.vision_config.pooling_kernel_size**2).tolist())


@dataclass(frozen=True)
class Item:
    """An image or a sound in a prompt.

    Attributes:
        kind: ``"image"`` or ``"audio"``.
        start: position of its first placeholder.
        end: the position after its last one.
        digest: of what the model sees or hears, without padding.
    """

    kind: str
    start: int
    end: int
    digest: bytes


def items(model: Any, ids: Sequence[int], given: Mapping[str, Any]) -> list[Item] | None:
    """The images and sounds of one prompt, ``ids``, by position. ``given``: the arguments of ``generate``.

    None if they do not match the placeholders, or if there is a video.
    """
    if given.get("pixel_values_videos") is not None:
        return None
    found = []
    for kind, (values, last) in _IN_ROWS:
        if given.get(values) is None:
            continue
        token = getattr(model.config, f"{kind}_token_id", None)
        if given.get(last) is None or token is None:
            return None
        places, begun = [index for index, one in enumerate(ids) if one == token], 0
        for row, size in enumerate(sizes(model, kind, given[last])):
            own = places[begun : begun + size]
            if not size or len(own) != size:
                return None
            found.append(Item(kind, own[0], own[-1] + 1, _digest(kind, given[values][row], given[last][row])))
            begun += size
        if begun != len(places):
            return None
    return sorted(found, key=lambda item: item.start)


def _digest(kind: str, values: Any, last: Any) -> bytes:
    import torch

    real = last.bool() if kind == "audio" else (last != -1).all(-1)
    digest = hashlib.sha256()
    for tensor in (values[real], last[real]):
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.digest()


def from_position(found: Sequence[Item], given: Mapping[str, Any], position: int) -> dict[str, Any]:
    """The arguments of ``generate`` with only those images and sounds that begin at ``position`` or later."""
    changed: dict[str, Any] = {}
    for kind, names in _IN_ROWS:
        own = [item for item in found if item.kind == kind]
        before = sum(item.start < position for item in own)
        if before:
            changed |= {name: None if before == len(own) else given[name][before:] for name in names}
    return {name: changed.get(name, value) for name, value in given.items() if changed.get(name, value) is not None}
