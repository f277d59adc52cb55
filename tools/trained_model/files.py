"""The files of the model: weights in bfloat16, the configuration as a released one, tokenizer, processor, examples."""

from __future__ import annotations

import json
import random
import wave
from pathlib import Path
from typing import Any

from tools.trained_model import media, model

#: For the pictures and sounds beside the model, which training does not draw.
_SEED = 7


def write(made: Any, folder: Path) -> None:
    """Write the checkpoint."""
    made = in_bfloat16(made)
    made.generation_config.eos_token_id = [model.EOS, model.END]
    made.generation_config.pad_token_id = model.PAD
    made.save_pretrained(folder)
    as_released(folder / "config.json")
    model.tokenizer().save_pretrained(folder)
    unified = made.config.model_type == "gemma4_unified"
    (folder / "processor_config.json").write_text(json.dumps(processor(unified), indent=2) + "\n", encoding="utf-8")


def in_bfloat16(made: Any) -> Any:
    """The model on the CPU, with frequencies of rotations in float32."""
    import torch

    made = made.to("cpu", torch.bfloat16)
    for name, buffer in made.named_buffers():
        if name.endswith("inv_freq"):
            buffer.data = buffer.data.float()
    return made


def as_released(file: Path) -> None:
    """Name the width of full attention's heads, and their number if it has its own, as all releases do, and leave the
    kind of rotation in the vision tower, which has had two names, to their default.
    """
    config = json.loads(file.read_text(encoding="utf-8"))
    text = config["text_config"]
    text.pop("per_layer_config", None)
    text["global_head_dim"] = 64
    if text["attention_k_eq_v"]:
        text["num_global_key_value_heads"] = 1
    config.get("vision_config", {}).pop("rope_parameters", None)
    config.pop("transformers_version", None)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def processor(unified: bool = False) -> dict[str, Any]:
    """The configuration of a ``Gemma4Processor``, or the 12B's ``Gemma4UnifiedProcessor``, which need torchvision. It
    takes pictures of 48 by 48 pixels.
    """
    shape = {"patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 70, "do_resize": False}
    name = "Gemma4Unified" if unified else "Gemma4"
    return {
        "processor_class": f"{name}Processor",
        "image_seq_length": 70,
        "audio_seq_length": 750,
        "image_processor": {"image_processor_type": f"{name}ImageProcessor", **shape},
        "video_processor": {"video_processor_type": f"{name}VideoProcessor", **shape},
        "feature_extractor": {"feature_extractor_type": f"{name}AudioFeatureExtractor"},
    }


def write_examples(folder: Path) -> None:
    """A picture of each colour with each shape, and each sound once."""
    from PIL import Image

    draw = random.Random(_SEED)
    (folder / "pictures").mkdir()
    (folder / "sounds").mkdir()
    for colour, shape in media.pairs(unseen=False) + media.pairs(unseen=True):
        Image.fromarray(media.picture(draw, colour, shape)).save(folder / "pictures" / f"{colour}-{shape}.png")
    for name in media.SOUNDS:
        short = name.removeprefix("a ").replace(" ", "-")
        with wave.open(str(folder / "sounds" / f"{short}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(media.RATE)
            file.writeframes((media.sound(draw, name) * 32767).astype("<i2").tobytes())
