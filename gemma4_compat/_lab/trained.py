"""The trained tiny Gemma 4: a folder with its checkpoint, an adapter, pictures and sounds.

It is an E2B; twins of other kinds are beside it, in the repository, not in the package (docs/TRAINED_MODEL.md). Unlike
the models of :mod:`tiny_models` they give answers that mean something; with their adapters, those of a pirate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._lab import tiny, tiny_models

#: Where it is in a checkout.
PLACE = "tests/data/trained_model"
#: Where twins are, by their kind.
TWINS = {"12B": f"{PLACE}_12b", "26B-A4B": f"{PLACE}_26b_a4b"}
#: Tokens of one picture of 48 by 48 pixels, and of one sound of 160 ms.
SOFT_TOKENS = 4
_NEW_TOKENS = 64
_KINDS = {"image": 1, "audio": 3}  # in mm_token_type_ids


@dataclass(frozen=True)
class Trained:
    """The folder, and how it is used.

    Attributes:
        folder: has ``model``, ``adapter``, ``pictures`` (PNG, 48 by 48) and ``sounds`` (WAV, 16 kHz, 160 ms). Twins
            share those of the first, which is beside them.
    """

    folder: Path

    @classmethod
    def find(cls, folder: Path | None = None) -> Trained:
        """The one in ``folder``, or by default in the checkout that this package runs from or the user is in.

        Raises:
            Gemma4CompatError: it is not there.
        """
        checkouts = (Path(__file__).resolve().parents[2], Path.cwd())
        places = [checkout / PLACE for checkout in checkouts] if folder is None else [folder]
        place = next((place for place in places if (place / "model" / "config.json").is_file()), None)
        if place is None:
            if folder is None:
                raise Gemma4CompatError(
                    "the trained model is in the repository, not in the installed package: run this in a checkout, or "
                    f"give --model the path of {PLACE} in one"
                )
            raise Gemma4CompatError(f"{str(folder)!r} has no model/config.json: it is not the folder {PLACE}")
        return cls(place)

    @property
    def checkpoint(self) -> Path:
        """The model, in bfloat16."""
        return self.folder / "model"

    @property
    def adapter(self) -> Path:
        """A LoRA that makes it speak like a pirate."""
        return self.folder / "adapter"

    @property
    def assistant(self) -> Path:
        """A ``Gemma4AssistantForCausalLM`` that drafts its answers, in bfloat16."""
        return self.folder / "assistant"

    def load(self, quantization: str | None = None, **options: Any) -> Any:
        """:func:`tiny.load` of the checkpoint."""
        return tiny.load(self.checkpoint, quantization, **options)

    def prompt(self, *said: str, picture: str | None = None, sound: str | None = None) -> dict[str, Any]:
        """What the model's forward and ``generate`` take, batch of 1.

        Args:
            said: by the user and the model in turns, first and last by the user.
            picture: a file of ``pictures`` without its suffix, shown with the last turn.
            sound: likewise, a file of ``sounds``.
        """
        import torch
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self.checkpoint))
        messages: list[dict[str, Any]] = [
            {"role": "model" if index % 2 else "user", "content": [{"type": "text", "text": text}]}
            for index, text in enumerate(said)
        ]
        given = [("image", picture), ("audio", sound)]
        messages[-1]["content"][:0] = [{"type": kind} for kind, name in given if name is not None]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        for kind in _KINDS:
            text = text.replace(f"<|{kind}|>", f"<|{kind}>{f'<|{kind}|>' * SOFT_TOKENS}<{kind}|>")
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if picture is not None or sound is not None:  # a text-only class takes none
            batch["mm_token_type_ids"] = sum(
                number * (ids == tokenizer.convert_tokens_to_ids(f"<|{kind}|>")) for kind, number in _KINDS.items()
            )
        unified = tiny_models.class_name(self.checkpoint).startswith("Gemma4Unified")
        batch |= {} if picture is None else seen([self.picture(picture)], unified=unified)
        return batch | ({} if sound is None else heard([self.sound(sound)], unified=unified))

    def answer(
        self, model: Any, *said: str, picture: str | None = None, sound: str | None = None, **options: Any
    ) -> str:
        """What the model says to a :meth:`prompt`, greedily unless ``options`` of ``generate`` say otherwise."""
        import torch
        from transformers import AutoTokenizer

        batch = self.prompt(*said, picture=picture, sound=sound)
        with torch.no_grad():
            tokens = model.generate(**batch, **{"max_new_tokens": _NEW_TOKENS, "do_sample": False, **options})
        new = tokens[0, batch["input_ids"].shape[1] :]
        return str(AutoTokenizer.from_pretrained(str(self.checkpoint)).decode(new, skip_special_tokens=True)).strip()

    def picture(self, name: str) -> Any:
        """One of ``pictures``: uint8 of shape (48, 48, 3)."""
        import numpy
        from PIL import Image

        with Image.open(self._example("pictures", f"{name}.png")) as opened:
            return numpy.asarray(opened.convert("RGB"))

    def sound(self, name: str) -> Any:
        """One of ``sounds``: float32 of shape (2560,), between -1 and 1."""
        import wave

        import numpy

        with wave.open(str(self._example("sounds", f"{name}.wav")), "rb") as file:
            return numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype("float32") / 32768

    def _example(self, kind: str, name: str) -> Path:
        own = self.folder / kind
        return (own if own.exists() else self.folder.parent / Path(PLACE).name / kind) / name


def seen(pictures: list[Any], *, unified: bool = False) -> dict[str, Any]:
    """What upstream's image processor makes of pictures, without the padding that it adds: ``pixel_values``, float32
    of shape (n, 36, 192), and ``image_position_ids``, int64 of shape (n, 36, 2).

    ``unified``: that of the 12B, which needs torchvision; here its patches are merged without it. Shapes (n, 4, 1728)
    and (n, 4, 2).
    """
    import torch
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    if unified:
        edge, size = math.isqrt(SOFT_TOKENS), pictures[0].shape[0] // math.isqrt(SOFT_TOKENS)
        pixels = torch.stack([torch.tensor(picture) for picture in pictures]).float() / 255
        patches = pixels.reshape(-1, edge, size, edge, size, 3).transpose(2, 3).reshape(len(pictures), SOFT_TOKENS, -1)
        places = torch.tensor([[index % edge, index // edge] for index in range(SOFT_TOKENS)])
        return {"pixel_values": patches, "image_position_ids": places.repeat(len(pictures), 1, 1)}
    processor = Gemma4ImageProcessorPil(do_resize=False, patch_size=8, pooling_kernel_size=3, max_soft_tokens=70)
    made = processor(images=pictures, return_tensors="pt")
    patches = 9 * SOFT_TOKENS
    return {name: made[name][:, :patches] for name in ("pixel_values", "image_position_ids")}


def heard(sounds: list[Any], *, unified: bool = False) -> dict[str, Any]:
    """What upstream's feature extractor makes of sounds: ``input_features``, float32 of shape (n, 16, 128), and
    ``input_features_mask``, bool of shape (n, 16).

    ``unified``: that of the 12B, whose features are the samples. Shapes (n, 4, 640) and (n, 4).
    """
    if unified:
        from transformers.models.gemma4_unified import feature_extraction_gemma4_unified as of_unified

        extractor: Any = of_unified.Gemma4UnifiedAudioFeatureExtractor()
    else:
        from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

        extractor = Gemma4AudioFeatureExtractor()
    made = extractor(sounds, return_tensors="pt")
    return {name: made[name] for name in ("input_features", "input_features_mask")}
