"""Train an adapter on a 4-bit Gemma 4 with rewards (GRPO, TRL's GRPOTrainer), on a card of 12 GB. pip install trl

python examples/grpo_small_card.py                                    a tiny random model: no download, no GPU
python examples/grpo_small_card.py --model google/gemma-4-E2B-it --data PROMPTS.txt --out my-run
python examples/grpo_small_card.py ... --resume                       from the last checkpoint in --out

``--data`` is a text file with one prompt per line. ``reward`` asks for short answers; replace it by yours.
The folder ``--out`` gets checkpoints and the adapter (``adapter``). On a GPU, completions are decoded by replay.
"""

from __future__ import annotations

import gemma4_compat  # isort: skip  (before the libraries it fixes)
import argparse
import sys
from pathlib import Path
from typing import Any

from gemma4_compat import testing

TARGETS = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
PROMPTS = [f"Say in one sentence what the number {number} is good for." for number in range(16)]
#: Tokens of a prompt that the plan reckons with.
LONGEST_PROMPT = 256


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


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """One number for each completion: the fewer tokens, the better."""
    return [1 / len(ids) for ids in completion_ids]


def train(options: argparse.Namespace) -> None:
    out = Path(options.out)
    print(f"training {options.model or 'a tiny model with random weights'}; libraries are imported first", flush=True)
    lines = PROMPTS if options.data is None else Path(options.data).read_text(encoding="utf-8").splitlines()
    checkpoint = options.model or tiny_checkpoint(out / "tiny")
    model = gemma4_compat.decode_fast(load(checkpoint, options))
    trainer = made(model, [line for line in lines if line.strip()], options, out)
    trainer.generation_config.disable_compile = False  # TRL sets it, and then nothing is replayed
    trainer.train(resume_from_checkpoint=True if options.resume else None)
    trainer.model.save_pretrained(out / "adapter")
    counted = gemma4_compat.statistics(trainer.model).decoding
    print(f"adapter: {out / 'adapter'} ({counted.replayed} tokens replayed, {counted.captured} graphs)")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or an id; default: a tiny random model")
    parser.add_argument("--data", help="a text file, one prompt per line")
    parser.add_argument("--out", default="grpo")
    parser.add_argument(
        "--vram", default="11GiB", help="what PyTorch may allocate; graphs of decoding get 0.5 GiB of it"
    )
    parser.add_argument("--completions", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="longest completion")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def tiny_checkpoint(folder: Path) -> str:
    return str(folder) if folder.exists() else testing.tiny_checkpoint(folder)


def load(checkpoint: str, options: argparse.Namespace) -> Any:
    """The base in 4 bits. The table of embeddings, towers and what else does not fit is offloaded."""
    import torch
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    placement: Any = {"": 0 if torch.cuda.is_available() else "cpu"}
    if options.model is not None:
        plan = gemma4_compat.plan_training(
            checkpoint,
            options.vram,
            max_length=LONGEST_PROMPT + options.tokens,
            batch=options.completions,
            r=options.rank,
            chunked_loss=True,  # TRL computes log-probabilities in pieces
        )
        placement = plan.device_map
    with gemma4_compat.quantize(offloaded=True):
        return AutoModelForImageTextToText.from_pretrained(
            checkpoint,
            dtype=torch.bfloat16,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=torch.bfloat16,
            ),
            device_map=placement,
        )


def made(model: Any, prompts: list[str], options: argparse.Namespace, out: Path) -> Any:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=options.completions,
        num_generations=options.completions,
        max_completion_length=options.tokens,
        gradient_checkpointing=True,
        learning_rate=1e-5,
        max_steps=options.steps,
        save_steps=max(1, options.steps // 2),
        logging_steps=1,
        report_to=[],
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    chat = options.model is not None
    asked = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in prompts]
    return GRPOTrainer(
        model,
        reward,
        arguments,
        Dataset.from_list([{"prompt": prompt} for prompt in asked]),
        processing_class=tokenizer_of(options.model) if chat else tiny_tokenizer(),
        # Dropout would make rollouts stochastic in a second way, and nothing would be replayed.
        peft_config=LoraConfig(
            r=options.rank,
            lora_alpha=2 * options.rank,
            lora_dropout=0.0,
            target_modules=TARGETS,
            task_type="CAUSAL_LM",
        ),
    )


def tokenizer_of(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def tiny_tokenizer() -> Any:
    """One token for each letter, after the tiny model's special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {chr(code): code for code in range(32, 127)}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>")


if __name__ == "__main__":
    sys.exit(main())
