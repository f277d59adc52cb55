"""Images, sounds and a processor for the tiny checkpoint, made here: real files, and upstream's own preprocessing."""

from __future__ import annotations

import inspect
import string
import wave
from pathlib import Path
from typing import Any, ClassVar

from gemma4_compat._lab import tiny_configs

SAMPLING_RATE = 16_000
#: What upstream calls them; the numbers are those of :func:`gemma4_compat._lab.tiny.config`.
_SPECIAL = {
    "<pad>": 0,
    "<eos>": 1,
    "<bos>": 2,
    "<unk>": 3,
    "<|turn>": 4,
    "<turn|>": 5,
    "<audio|>": 249,
    "<|image|>": tiny_configs.IMAGE_TOKEN,
    "<|audio|>": tiny_configs.AUDIO_TOKEN,
    "<|video|>": tiny_configs.VIDEO_TOKEN,
    "<|image>": 253,
    "<image|>": 254,
    "<|audio>": 255,
}
_TEMPLATE = """\
<bos>{% for turn in messages %}<|turn>{{ turn['role'] }}
{% for part in turn['content'] %}\
{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<|{{ part['type'] }}|>{% endif %}\
{% endfor %}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
{% endif %}"""


class _Videos:
    """In place of upstream's video processor where torchvision, which that needs, is missing: each frame goes through
    upstream's image processor.
    """

    model_input_names: ClassVar[list[str]] = ["pixel_values_videos", "video_position_ids"]

    def __init__(self, images: Any) -> None:
        self.images = images

    def __call__(self, videos: Any, video_metadata: Any = None, **_: Any) -> Any:
        import torch
        from transformers import BatchFeature, Gemma4Model
        from transformers.video_utils import VideoMetadata

        found = [self.images(images=[video], return_tensors="pt") for video in videos]
        counts = [len(video) for video in videos]
        pixels = [one["pixel_values"] for one in found]
        positions = [one["image_position_ids"] for one in found]
        flat = "num_frames_per_video" in inspect.signature(Gemma4Model.get_video_features).parameters
        join = torch.cat if flat else torch.stack
        data = {
            "pixel_values_videos": join(pixels),
            "video_position_ids": join(positions),
            "num_soft_tokens_per_video": [int(one["num_soft_tokens_per_image"][0]) for one in found],
            "video_metadata": [VideoMetadata(**metadata) for metadata in video_metadata],
        }
        if flat:
            data["num_frames_per_video"] = torch.tensor(counts)
        return BatchFeature(data=data)


def _processor_class() -> tuple[Any, Any]:
    """Upstream's processor and video processor for Gemma 4, or what does without torchvision."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

        return Gemma4Processor, Gemma4VideoProcessor

    class WithoutTorchvision(Gemma4Processor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "video_processor":
                super().check_argument_for_proper_class(argument_name, argument)
            return type(argument)

    return WithoutTorchvision, None


def write_png(path: Path, seed: int, size: tuple[int, int] = (60, 40)) -> Path:
    """A picture of coloured rectangles; ``size`` is width and height in pixels."""
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(seed)
    pixels = numpy.full((size[1], size[0], 3), random.integers(0, 256, 3), numpy.uint8)
    for _ in range(12):
        left, top = random.integers(0, size[0] - 4), random.integers(0, size[1] - 4)
        pixels[top : top + size[1] // 3, left : left + size[0] // 3] = random.integers(0, 256, 3)
    Image.fromarray(pixels).save(path)
    return path


def write_wav(path: Path, seed: int, seconds: float = 1.0) -> Path:
    """A chord with noise: 16 kHz, mono, 16 bits."""
    import numpy

    random = numpy.random.default_rng(seed)
    time = numpy.arange(int(seconds * SAMPLING_RATE)) / SAMPLING_RATE
    chord = sum(numpy.sin(2 * numpy.pi * frequency * time) for frequency in random.uniform(200, 4000, 3))
    sound = 0.2 * chord + 0.05 * random.standard_normal(len(time))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLING_RATE)
        file.writeframes((sound * 32767).clip(-32768, 32767).astype("<i2").tobytes())
    return path


def read_wav(path: Path) -> Any:
    """Samples of a file that :func:`write_wav` wrote, float32 between -1 and 1."""
    import numpy

    with wave.open(str(path), "rb") as file:
        assert file.getframerate() == SAMPLING_RATE
        return numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype("float32") / 32768


def processor() -> Any:
    """A ``Gemma4Processor`` for ``tiny_configs.config``: a token a character, 70 soft tokens an image at
    most.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    taken = set(_SPECIAL.values())
    characters = iter([*string.printable.rstrip("\r\x0b\x0c"), *(chr(code) for code in range(0x100, 0x200))])
    vocabulary = {next(characters): number for number in range(tiny_configs.VOCABULARY) if number not in taken}
    tokens = Tokenizer(models.WordLevel({**_SPECIAL, **vocabulary}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        extra_special_tokens={
            "image_token": "<|image|>",
            "audio_token": "<|audio|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "sot_token": "<|turn>",
            "eot_token": "<turn|>",
        },
    )
    shape = {"patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 70}
    images = Gemma4ImageProcessorPil(**shape)
    cls, videos = _processor_class()
    return cls(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=_Videos(images) if videos is None else videos(**shape),
        chat_template=_TEMPLATE,
        image_seq_length=70,
    )


def chat(
    processor: Any,
    text: str,
    image: Path | None = None,
    sound: Path | None = None,
    *,
    device: Any = "cpu",
) -> Any:
    """What the model gets of one turn of a user with the files of an image and a sound."""
    from PIL import Image

    content = [{"type": "text", "text": text}]
    given: dict[str, Any] = {}
    if image is not None:
        content.insert(0, {"type": "image"})
        given["images"] = [[Image.open(image)]]
    if sound is not None:
        content.append({"type": "audio"})
        given["audio"] = [read_wav(sound)]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    return processor(text=[prompt], **given, return_tensors="pt").to(device)


def clip(processor: Any, text: str, frames: list[Path]) -> Any:
    """What the model gets of a question about a video with these frames, one a second."""
    from PIL import Image

    prompt = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}], add_generation_prompt=True
    )
    metadata = {"total_num_frames": len(frames), "fps": 1.0, "frames_indices": list(range(len(frames)))}
    video = [Image.open(frame).resize((60, 40)) for frame in frames]
    return processor(
        text=[prompt], videos=[video], video_metadata=[metadata], do_sample_frames=False, return_tensors="pt"
    )
