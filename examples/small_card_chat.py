"""Chat with Gemma 4, text and images, inside a VRAM budget.

python examples/small_card_chat.py                                          a tiny random model: no download, no GPU
python examples/small_card_chat.py --model google/gemma-4-E4B-it --vram 4GiB
python examples/small_card_chat.py --model FOLDER --vram 2GiB --adapter FOLDER --image cat.jpg --prompt "What is it?"
python examples/small_card_chat.py --model FOLDER --assistant FOLDER        drafts by a Gemma 4 assistant

The placement and the expected peak are printed before anything is loaded. Every turn passes the whole conversation to
`generate`, which reads only what is new of it (`reuse_prefix`). A checkpoint's processor needs pillow and torchvision,
with images or without (`pip install pillow torchvision`).
"""

from __future__ import annotations

import gemma4_compat  # isort: skip  (before the libraries it fixes)
import argparse
import contextlib
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from gemma4_compat import testing

MIB = 2**20


class UsageError(Exception):
    """The user gave something that cannot be used; the text says what to do."""


class Bytes:
    """The tiny model's stand-in for a processor: one token per byte, an image as one square of 6 by 6 patches."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __call__(self, turns: list[dict[str, Any]], image: Any) -> dict[str, Any]:
        """Inputs for the conversation so far; the image belongs to the first turn."""
        import torch

        text = "\n".join(str(turn["content"]) for turn in turns)
        ids = [3 + byte % 200 for byte in text.encode()][-1024:]
        batch: dict[str, Any] = {}
        if image is not None:
            size, side = self.config.vision_config.patch_size, 6
            pixels = torch.tensor(list(image.resize((side * size, side * size)).tobytes()), dtype=torch.float32) / 255
            patches = pixels.reshape(side, size, side, size, 3).permute(0, 2, 1, 3, 4).reshape(1, side**2, -1)
            grid = torch.arange(side)
            batch["pixel_values"] = patches
            batch["image_position_ids"] = torch.cartesian_prod(grid, grid).flip(-1)[None]
            soft = (side // self.config.vision_config.pooling_kernel_size) ** 2
            ids = [self.config.image_token_id] * soft + ids
        batch["input_ids"] = torch.tensor([ids])
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["mm_token_type_ids"] = (batch["input_ids"] == self.config.image_token_id).long()
        return batch

    def decode(self, ids: Any, **_options: Any) -> str:
        """A printable character for each token, followed by a space, so that it is shown at once."""
        return "".join(f"{chr(33 + int(token) % 94)} " for token in ids)


class Processor:
    """A checkpoint's own processor."""

    def __init__(self, model: str) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(model)

    def __call__(self, turns: list[dict[str, Any]], image: Any) -> Any:
        """Inputs for the conversation so far; the image belongs to the first turn."""
        messages = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        if image is not None:
            messages[0]["content"].insert(0, {"type": "image", "image": image})
        return self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )

    def decode(self, ids: Any, **options: Any) -> str:
        """The text of these tokens."""
        return str(self.processor.decode(ids, **options))


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or id of a checkpoint (default: a tiny random one)")
    parser.add_argument(
        "--vram",
        help="GPU memory that PyTorch may use, such as 4GiB (default: 4GiB; too little for all of the tiny model)",
    )
    parser.add_argument("--adapter", type=Path, help="folder of a PEFT adapter")
    parser.add_argument("--assistant", help="folder or id of the model's assistant, which drafts tokens")
    parser.add_argument("--image", type=Path, help="an image to begin the conversation with")
    parser.add_argument("--prompt", help="answer this and exit; without it, start a conversation")
    parser.add_argument("--context", type=int, default=2048, help="tokens to plan for (default: 2048)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest answer (default: 256)")
    given = parser.parse_args(argv)
    if given.max_new_tokens < 1 or given.context < 1:
        parser.error("--max-new-tokens and --context must be 1 or more")
    if given.prompt is not None and not given.prompt.strip():
        parser.error("--prompt is empty")
    return given


def opened(path: Path | None) -> Any:
    """The image, in RGB."""
    if path is None:
        return None
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UsageError("--image needs pillow: pip install pillow torchvision") from None
    try:
        return Image.open(path).convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise UsageError(f"--image {path} cannot be read as an image: {error}") from error


def planned(model: str, given: argparse.Namespace, *, on_gpu: bool) -> Any:
    """The plan, printed before anything is loaded."""
    tiny = given.model is None

    def plan_for(vram: str | int) -> Any:
        return gemma4_compat.plan_device_map(
            model,
            vram,
            context=min(given.context, 256) if tiny else given.context,
            quantize="4bit-double" if on_gpu else None,
            adapter=given.adapter,
            vision=given.image is not None,
        )

    vram: str | int = given.vram or "4GiB"
    if tiny and given.vram is None:  # a little less than all of it needs, so that something is offloaded
        vram = plan_for("64MiB").use[0].peak - MIB // 4
    plan = plan_for(vram)
    for device, names in sorted(by_device(plan.device_map).items()):
        print(f"{device:>5}: {', '.join(names)}")
    for device, use in plan.use.items():
        print(f"expected peak on {device}: {use.peak / MIB:,.1f} of {use.budget / MIB:,.1f} MiB")
    print(f"in host memory: {plan.cpu / MIB:,.1f} MiB, longest context: {plan.longest_context} tokens", flush=True)
    return plan


def by_device(device_map: dict[str, Any]) -> dict[str, list[str]]:
    """Device -> the modules on it, with numbered modules counted."""
    found: dict[str, Counter[str]] = {}
    for name, device in device_map.items():
        head, _, last = name.rpartition(".")
        key = f"{head.removeprefix('model.')} ({{}} of them)" if last.isdigit() else name.removeprefix("model.")
        found.setdefault(str(device), Counter())[key] += 1
    return {device: [name.format(count) for name, count in names.items()] for device, names in found.items()}


def loaded(model: str, plan: Any, given: argparse.Namespace, *, on_gpu: bool, folder: Path) -> Any:
    """Load the model as planned. Without a GPU the CPU stands for the card, the disk for host memory."""
    import torch
    import transformers
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    transformers.utils.logging.enable_progress_bar()
    placement = dict(plan.device_map)
    options: dict[str, Any] = {}
    if on_gpu:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=["lm_head"],
        )
    else:
        placement = {name: "disk" if device in ("cpu", "disk") else "cpu" for name, device in placement.items()}
    if "disk" in placement.values():
        options["offload_folder"] = folder / "offload"
    inside = gemma4_compat.quantize(offloaded=True) if plan.quantize_offloaded else contextlib.nullcontext()
    with inside:
        loaded = Gemma4ForConditionalGeneration.from_pretrained(
            model, dtype=torch.bfloat16, device_map=placement, **options
        )
    if given.adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, given.adapter)
    loaded.generation_config.prefill_chunk_size = plan.prefill_chunk  # long prompts in parts, if they have to be
    graphs = plan.fast and on_gpu and given.assistant is None  # with an assistant, steps are not replayed
    return gemma4_compat.decode_fast(loaded.eval(), reuse_prefix=True, graphs=graphs)


def loaded_assistant(name: str | None, model: Any) -> Any:
    """The assistant, where the model computes; None without a name."""
    if name is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM

    place = {"": gemma4_compat.input_device(model)}
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map=place).eval()


def answer(
    model: Any, processor: Any, turns: list[dict[str, Any]], image: Any, limit: int, assistant: Any = None
) -> str:
    """Print the answer as it comes, and return it."""
    import torch
    from transformers import TextStreamer

    batch = {name: value.to(gemma4_compat.input_device(model)) for name, value in processor(turns, image).items()}
    streamer = TextStreamer(processor, skip_prompt=True, skip_special_tokens=True)
    with torch.no_grad():
        tokens = model.generate(
            **batch, max_new_tokens=limit, do_sample=False, streamer=streamer, assistant_model=assistant
        )
    return str(processor.decode(tokens[0, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def chat(given: argparse.Namespace, folder: Path) -> None:
    if given.model is None:
        print("No --model: a tiny one with random weights. Its answers are noise.", flush=True)
    import torch

    image = opened(given.image)
    if given.adapter is not None and not (given.adapter / "adapter_config.json").is_file():
        raise UsageError(f"--adapter {given.adapter} is no folder with an adapter_config.json")
    on_gpu = torch.cuda.is_available()
    model = testing.tiny_checkpoint(folder / "tiny") if given.model is None else given.model
    if not on_gpu:
        print("No GPU: the CPU stands for the card and the disk for host memory; nothing is quantized.")
    plan = planned(model, given, on_gpu=on_gpu)
    loaded_model = loaded(model, plan, given, on_gpu=on_gpu, folder=folder)
    assistant = loaded_assistant(given.assistant, loaded_model)
    processor = Bytes(loaded_model.config) if given.model is None else Processor(model)
    if on_gpu:
        print(f"on the card now: {torch.cuda.memory_allocated() / MIB:,.1f} MiB")
    turns: list[dict[str, Any]] = []
    before = 0, 0
    while True:
        text = given.prompt
        if text is None:
            try:
                text = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if not text:
                continue
        turns.append({"role": "user", "content": text})
        said = answer(loaded_model, processor, turns, image, given.max_new_tokens, assistant)
        turns.append({"role": "assistant", "content": said})
        if given.prompt is not None:
            return
        counted = gemma4_compat.statistics(loaded_model).decoding
        read, held = counted.prompt_tokens_read - before[0], counted.prompt_tokens_reused - before[1]
        print(f"(read {read} tokens of {read + held})")
        before = counted.prompt_tokens_read, counted.prompt_tokens_reused


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    with tempfile.TemporaryDirectory(prefix="small-card-chat-", ignore_cleanup_errors=True) as folder:
        try:
            chat(given, Path(folder))
        except (UsageError, gemma4_compat.Gemma4CompatError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except OSError as error:  # what transformers raises for a checkpoint it cannot find or read
            if given.model is None:
                raise
            print(f"error: --model {given.model} cannot be loaded: {str(error).splitlines()[0]}", file=sys.stderr)
            return 2
        except ImportError as error:  # no torchvision, or one that was built for another torch
            print(f"error: {' '.join(str(error).split())}", gemma4_compat.explain(error).advice or "", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
