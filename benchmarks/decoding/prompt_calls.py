"""How much Python runs from ``generate`` to its first token, with and without replayed prompts. Needs no GPU.

``python benchmarks/decoding/prompt_calls.py``: an E2B with all its layers and narrow weights in 4 bits, on the CPU. A
stand-in captures; its replays do nothing, so what is counted is what remains on the host.
"""

from __future__ import annotations

import cProfile
import pstats
import tempfile
from typing import Any
from unittest import mock

CASES = ((64, {}), (512, {}), (4096, {"prefill_chunk_size": 512}), (64, {"images": 1}))
WAYS = ("without replay", "replayed", "in pieces")
#: Patches along the edge of an image. Nine make one of its tokens.
EDGE = 6


def build() -> Any:
    """The model, with its weights drawn at random."""
    import torch
    import transformers

    from gemma4_compat._gemma4.models import variants

    config = variants.config("E2B")
    text = config.text_config
    text.hidden_size = text.hidden_size_per_layer_input = text.head_dim = text.global_head_dim = 64
    text.intermediate_size, text.num_attention_heads = 128, 1
    text.vocab_size = text.vocab_size_per_layer_input = 256
    config.audio_config.num_hidden_layers = 2
    vision = config.vision_config
    vision.hidden_size = vision.head_dim = vision.intermediate_size = 64
    vision.num_attention_heads = vision.num_key_value_heads = 1
    config.image_token_id = 250
    torch.manual_seed(0)
    kind = transformers.Gemma4ForConditionalGeneration
    quantized = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        kind(config).to(torch.bfloat16).save_pretrained(folder)
        return kind.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=quantized).eval()


def ask(model: Any, length: int, seed: int, *, images: int = 0, **options: Any) -> None:
    """Read a prompt, decode its first token."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 200, (1, length), generator=generator)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}
    if images:
        ids[:, 4 : 4 + images * EDGE**2 // 9] = model.config.image_token_id
        places = torch.cartesian_prod(torch.arange(EDGE), torch.arange(EDGE))
        given["image_position_ids"] = places.expand(images, EDGE**2, 2)
        given["pixel_values"] = torch.rand(images, EDGE**2, 3 * 16 * 16, generator=generator)
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
    with torch.no_grad():
        model.generate(**given, **options)


def counted(model: Any, length: int, *, vary: bool, **options: Any) -> tuple[int, int]:
    """Calls of Python functions, and PyTorch operations; ``vary``: no two prompts of one length."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from gemma4_compat._lab.stand_ins.tape import Tape

    class Operations(TorchDispatchMode):  # type: ignore[misc]
        count = 0

        def __torch_dispatch__(self, op: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return op(*args, **(kwargs or {}))

    for seed in range(5):
        ask(model, length - (seed if vary else 0), seed, **options)
    with mock.patch.object(Tape, "replay", return_value=None):
        for seed in range(4):  # masks are others where nothing is read
            ask(model, length, seed, **options)
        with Operations() as operations:
            ask(model, length, 6, **options)
        with cProfile.Profile() as profile:
            ask(model, length, 7, **options)
    return pstats.Stats(profile).total_calls, operations.count  # type: ignore[attr-defined]


def main() -> None:
    import gemma4_compat
    from gemma4_compat._generation.prompts import prompts
    from gemma4_compat._graphs import recording
    from gemma4_compat._lab.stand_ins.tape import standing_in

    model = build()
    with standing_in(recording.RECORDERS):
        for length, options in CASES:
            for way in WAYS[: 2 if "images" in options else 3]:  # in pieces, only text
                gemma4_compat.decode_fast(model, enabled=False)
                gemma4_compat.decode_fast(model, any_length=way == "in pieces")
                limit = 0 if way == "without replay" else prompts.MAX_TOKENS
                with mock.patch.object(prompts, "MAX_TOKENS", limit):
                    given = {} if way == "in pieces" else options
                    found = counted(model, length, vary=way == "in pieces", **given)
                print(f"{length:5} tokens {given or ''} {way}: {found[0]:,} calls, {found[1]:,} operations")


if __name__ == "__main__":
    main()
