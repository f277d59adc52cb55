"""Train an adapter on a 4-bit Gemma 4 (QLoRA) with the loss in chunks, and merge it.

python examples/qlora_small_card.py                                   a tiny random model: no download, no GPU
python examples/qlora_small_card.py --model google/gemma-4-E4B-it --data FILE.txt --vram 12GiB --out my-run
python examples/qlora_small_card.py ... --resume                      from the last checkpoint in --out
python examples/qlora_small_card.py ... --trl                         with TRL's SFTTrainer: pip install trl

``--data`` is a text file with one sample per line. The folder ``--out`` gets checkpoints, the adapter (``adapter``)
and, with ``--merge``, the merged model (``merged``), the same as ``gemma4-compat merge MODEL OUT/adapter OUT/merged``
writes. TRL computes its loss in pieces itself, keeps adapters in bfloat16, and needs the head on the GPU.
On a GPU, samples of up to 2,048 tokens (``--sequence``) are padded to a few lengths, and their steps are replayed.
"""

from __future__ import annotations

import gemma4_compat  # isort: skip  (before the libraries it fixes)
import argparse
import functools
import sys
from pathlib import Path
from typing import Any

from gemma4_compat import testing

#: Longer steps are not CPU-bound.
SHORT = 2048
TARGETS = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
SAMPLES = [f"Sample {number}: the quick brown fox jumps over the lazy dog {number} times." for number in range(16)]


class Bytes:
    """The tiny model's stand-in for a tokenizer: one token per byte."""

    def __call__(self, text: str) -> dict[str, Any]:
        """The ids of a text."""
        return {"input_ids": [3 + byte % 200 for byte in text.encode()]}


def main() -> int:
    options = parsed()
    try:
        train(options)
    except (OSError, gemma4_compat.Gemma4CompatError) as error:  # a file or a model that is not there, no room
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except ImportError as error:  # such as a torchvision that was built for another torch
        print(f"error: {' '.join(str(error).split())}", gemma4_compat.explain(error).advice or "", file=sys.stderr)
        return 2
    return 0


def train(options: argparse.Namespace) -> None:
    out = Path(options.out)
    print(f"training {options.model or 'a tiny model with random weights'}; libraries are imported first", flush=True)
    lines = SAMPLES if options.data is None else Path(options.data).read_text(encoding="utf-8").splitlines()
    checkpoint = options.model or tiny_checkpoint(out / "tiny")
    tokenizer = Bytes() if options.model is None else tokenizer_of(checkpoint)
    samples = [sample(tokenizer, line, options.sequence) for line in lines if line.strip()]
    model = load(checkpoint, options)
    trainer = (made_by_trl if options.trl else made)(model, samples, options, out)
    trainer.train(resume_from_checkpoint=True if options.resume else None)
    trainer.model.save_pretrained(out / "adapter")
    print(f"adapter: {out / 'adapter'}")
    if options.merge:
        report = gemma4_compat.merge_adapter(checkpoint, out / "adapter", out / "merged", progress=False)
        print(f"merged: {out / 'merged'} (parity {'ok' if report.parity and report.parity.ok else 'not checked'})")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or an id; default: a tiny random model")
    parser.add_argument("--data", help="a text file, one sample per line")
    parser.add_argument("--out", default="qlora")
    parser.add_argument("--vram", help="offload layers that do not fit, such as 8GiB; default: all on the GPU")
    parser.add_argument("--sequence", type=int, default=1024, help="longest sample, in tokens")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--trl", action="store_true", help="use TRL's SFTTrainer instead of transformers' Trainer")
    return parser.parse_args()


def tiny_checkpoint(folder: Path) -> str:
    return str(folder) if folder.exists() else testing.tiny_checkpoint(folder)


def tokenizer_of(checkpoint: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def load(checkpoint: str, options: argparse.Namespace) -> Any:
    """The base in 4 bits, prepared, with an adapter, and what train_fast turns on."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    main_device = 0 if torch.cuda.is_available() else "cpu"
    placement: dict[str, Any] = {"device_map": {"": main_device}}
    if options.vram is not None:
        placement = {"device_map": "auto", "max_memory": {main_device: options.vram, "cpu": "64GiB"}}
    with gemma4_compat.quantize(offloaded=True):
        model = AutoModelForImageTextToText.from_pretrained(
            checkpoint,
            dtype=torch.bfloat16,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
            **placement,
        )
    model = prepare_model_for_kbit_training(model)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS))
    return gemma4_compat.train_fast(model, loss="always", graphs=padding(options) is not None)


def padding(options: argparse.Namespace) -> int | None:
    """Samples are padded to multiples of this: four lengths, as many as are replayed. None: they are not padded."""
    import torch

    if not torch.cuda.is_available() or options.sequence > SHORT:
        return None
    return 64 * -(-options.sequence // (4 * 64))


def sample(tokenizer: Any, text: str, length: int) -> dict[str, Any]:
    ids = list(tokenizer(text)["input_ids"])[:length]
    return {"input_ids": ids, "labels": ids}


def collated(samples: list[dict[str, Any]], *, multiple: int = 1) -> dict[str, Any]:
    """A batch, padded on the right; padding has no label."""
    import torch

    longest = multiple * -(-max(len(one["input_ids"]) for one in samples) // multiple)

    def padded(name: str, filler: int) -> Any:
        return torch.tensor([list(one[name]) + [filler] * (longest - len(one[name])) for one in samples])

    lengths = torch.tensor([len(one["input_ids"]) for one in samples])
    mask = (torch.arange(longest)[None] < lengths[:, None]).long()
    ids = padded("input_ids", 0)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": padded("labels", -100),
        "mm_token_type_ids": torch.zeros_like(ids),
    }


def settings(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """What both trainers are told."""
    import torch

    return {
        "output_dir": str(out),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_checkpointing": True,
        "learning_rate": 2e-4,
        "max_steps": options.steps,
        "save_steps": max(1, options.steps // 2),
        "logging_steps": 1,
        "report_to": [],
        "remove_unused_columns": False,
        "use_cpu": not torch.cuda.is_available(),
    }


def made(model: Any, samples: list[dict[str, Any]], options: argparse.Namespace, out: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**settings(options, out))
    collator = functools.partial(collated, multiple=padding(options) or 1)
    return Trainer(model, arguments, train_dataset=samples, data_collator=collator)


def made_by_trl(model: Any, samples: list[dict[str, Any]], options: argparse.Namespace, out: Path) -> Any:
    """The samples are tokens already, so nothing is prepared; TRL wants a tokenizer anyway, to pad with its token."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    prepared = {"pad_to_multiple_of": padding(options), "dataset_kwargs": {"skip_prepare_dataset": True}}
    arguments = SFTConfig(**settings(options, out), max_length=None, **prepared)
    tokenizer = tiny_tokenizer() if options.model is None else tokenizer_of(options.model)
    return SFTTrainer(model, arguments, train_dataset=Dataset.from_list(samples), processing_class=tokenizer)


def tiny_tokenizer() -> Any:
    """The tiny model's special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<bos>": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


if __name__ == "__main__":
    sys.exit(main())
