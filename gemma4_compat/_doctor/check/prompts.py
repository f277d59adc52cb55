"""The prompts of a check: text, text longer than the sliding window, an image, a sound."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models import random_inputs

#: In the order in which they run.
KINDS = ("text", "long text", "image", "sound")
_TOKENS = 32
#: Tokens of the long text after the first window.
_PAST_THE_WINDOW = 32
_TEXT = (
    "Three people walk along the shore in the early morning. The first one asks where the boats have gone, and the "
    "second one, who has lived here all her life, points at the horizon and answers:"
)
_QUESTION = "What is in this picture?"


@dataclass(frozen=True)
class Prompt:
    """One prompt: its kind, and what the forward takes (batch of 1)."""

    kind: str
    batch: dict[str, Any]


def kinds(config: Any) -> list[str]:
    """Those of :data:`KINDS` that a model with this configuration takes."""
    found = ["text", "long text"]
    found += ["image"] if getattr(config, "vision_config", None) is not None else []
    return found + (["sound"] if getattr(config, "audio_config", None) is not None else [])


def placeholders(config: Any) -> list[int]:
    """Tokens that stand for media: a model with random weights may generate them, and none belongs to one."""
    names = ("image_token_id", "audio_token_id", "video_token_id")
    return [value for name in names if isinstance(value := getattr(config, name, None), int)]


def build(kind: str, config: Any, folder: Path, *, longest: int, image: Path | None = None) -> Prompt:
    """The prompt of a kind.

    Args:
        kind: one of :data:`KINDS`.
        config: the model's.
        folder: of the checkpoint; its tokenizer and its processor are used if it has them.
        longest: tokens that a prompt may have.
        image: a picture, in place of random values.

    Raises:
        Gemma4CompatError: the picture cannot be used.
    """
    if kind == "image" and image is not None:
        return Prompt(kind, _picture(folder, image))
    if kind == "text" and (ids := _tokenized(folder)) is not None:
        return Prompt(kind, random_inputs.text_batch(config, ids[:, :longest]))
    window = getattr(config.get_text_config(), "sliding_window", None) or 512
    length = {"text": _TOKENS, "long text": window + _PAST_THE_WINDOW}.get(kind, _TOKENS)
    return Prompt(kind, _with_media(kind, config, random_ids(config, min(length, longest), seed=KINDS.index(kind))))


def random_ids(config: Any, length: int, *, seed: int) -> Any:
    """Token ids, shape (1, ``length``), int64: the same on every machine, and none of them special."""
    import torch

    plain = random_inputs.plain_tokens(config)
    return plain[torch.randint(len(plain), (1, length), generator=torch.Generator().manual_seed(seed))]


def _with_media(kind: str, config: Any, ids: Any) -> dict[str, Any]:
    """``ids`` with an image or a sound of random values, four soft tokens, in their middle."""
    import torch

    batch = random_inputs.text_batch(config, ids)
    generator = torch.Generator().manual_seed(11)
    if kind == "image":
        random_inputs.add_image(config, batch, slice(8, 12), generator)
    elif kind == "sound":
        random_inputs.add_sound(config, batch, slice(8, 12), generator)
    return batch


def _tokenized(folder: Path) -> Any:
    """The text as the checkpoint's own tokenizer reads it; None without one."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)(_TEXT, return_tensors="pt")["input_ids"]


def _picture(folder: Path, image: Path) -> dict[str, Any]:
    if not (folder / "preprocessor_config.json").is_file() and not (folder / "processor_config.json").is_file():
        raise Gemma4CompatError(
            f"--image {str(image)!r} needs the checkpoint's processor, and its folder has no processor_config.json; "
            "leave --image out: the prompt then has an image of random values"
        )
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(str(folder), local_files_only=True)
    with Image.open(image) as opened:
        picture = opened.convert("RGB")
    if getattr(processor, "chat_template", None):
        content = [{"type": "image", "image": picture}, {"type": "text", "text": _QUESTION}]
        return dict(
            processor.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        )
    text = f"{processor.image_token} {_QUESTION}"
    return dict(processor(text=text, images=[picture], return_tensors="pt"))
