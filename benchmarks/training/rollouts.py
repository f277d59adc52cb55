"""Do replayed rollouts have the tokens and logits of eager ones after each step of an optimizer?

python benchmarks/training/rollouts.py --shape E2B [--json FILE] [--steps 3] [--own]

A 4-bit model with random weights and a float32 LoRA adapter in training mode, as for GRPO: eight completions of a text
are drawn by replay, a step with checkpointing under bfloat16 autocast follows (the loss weighs log-probabilities of
the completions by made-up advantages), then the same prompt is decoded greedily, eagerly and by replay. ``--own`` lets
kernels of this package compute; then tokens of random weights differ, and the step only has to stay finite.
Without a GPU (``--shape tiny-E2B``) nothing is replayed. Exit code 1: a number is not finite, or logits differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks.decoding import models
from benchmarks.small_card import device

TARGETS = r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
ROWS, PROMPT, NEW, COMPARED = 8, 64, 48, 24
#: Tokens of each row whose logits the training step holds at once.
PIECE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=sorted(models.SHAPES))
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--own", action="store_true", help="decode_fast's custom kernels in place of exact=True")
    arguments = parser.parse_args()
    result = measured(arguments.shape, arguments.steps, own=arguments.own)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(bool(problems(result, own=arguments.own)))


def measured(shape: str, steps: int, *, own: bool) -> dict[str, Any]:
    """What each step gave, with the machine and the releases."""
    import torch

    model = load(shape, exact=not own)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)
    ids = models.text_prompt(model, PROMPT)["input_ids"].repeat(ROWS, 1)
    found = []
    for _ in range(steps):
        completed = generate(model, ids, new=NEW, do_sample=True, top_k=0).sequences
        found.append(step(model, completed, optimizer) | compared(model, ids))
    return {"shape": shape, "own": own, "machine": device.machine(), "steps": found}


def problems(result: dict[str, Any], *, own: bool) -> list[str]:
    """Steps with numbers that are not finite or, in PyTorch's arithmetic, other logits than eager ones."""
    steps = enumerate(result["steps"])
    return [f"step {number}" for number, one in steps if not one["finite"] or not (own or one["logits_equal"])]


def load(shape: str, *, exact: bool) -> Any:
    """In training mode, with an adapter that changes nothing yet."""
    with tempfile.TemporaryDirectory(dir=models.work_folder(shape)) as folder:
        model = adapted(shape, "gpu", Path(folder))
    return gemma4_compat.decode_fast(model, exact=exact)


def adapted(shape: str, where: str, folder: Path) -> Any:
    """A base in 4 bits, where :data:`models.WHERE` says, with a float32 adapter; in training mode."""
    import torch
    from peft import LoraConfig, get_peft_model

    models.build(shape, folder, weights := {})
    base = models.load(where, folder, weights)
    torch.manual_seed(1)
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=TARGETS)
    return get_peft_model(base, lora).train()


def generate(model: Any, ids: Any, *, new: int, **options: Any) -> Any:
    """With logits, [rows, vocabulary] for each new token, unless ``output_logits=False``."""
    import torch

    options = {"output_logits": True, "return_dict_in_generate": True} | options
    options |= {"max_new_tokens": new, "min_new_tokens": new}
    model.gradient_checkpointing_disable()  # as TRL does
    with torch.no_grad():
        return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def step(model: Any, completed: Any, optimizer: Any) -> dict[str, Any]:
    """One step of the optimizer on these texts."""
    import torch

    model.gradient_checkpointing_enable({"use_reentrant": False})
    advantages = torch.linspace(-1, 1, ROWS, device=completed.device)[:, None]
    loss = -(advantages * log_probabilities(model, completed)).mean()
    loss.backward()
    trained = [one for one in model.parameters() if one.requires_grad]
    norm = float(torch.nn.utils.get_total_norm([one.grad for one in trained]))
    optimizer.step()
    optimizer.zero_grad()
    finite = all(bool(torch.isfinite(one).all()) for one in (loss, *trained))
    return {"loss": loss.item(), "gradient_norm": norm, "finite": finite}


def log_probabilities(model: Any, completed: Any) -> Any:
    """Of the completions, [rows, tokens], under bf16 autocast; as in TRL the head runs on a few tokens at a time."""
    import torch
    from torch.utils.checkpoint import checkpoint

    inner = models.base(model)
    cap = inner.config.get_text_config().final_logit_softcapping

    def chances(states: Any, tokens: Any) -> Any:
        logits = inner.lm_head(states)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return torch.log_softmax(logits.float(), -1).gather(-1, tokens[..., None])[..., 0]

    with torch.autocast(completed.device.type, dtype=torch.bfloat16):
        given = {"input_ids": completed, "attention_mask": torch.ones_like(completed), "use_cache": False}
        states = inner.model(**given).last_hidden_state[:, PROMPT - 1 : -1]
        pieces = zip(states.split(PIECE, 1), completed[:, PROMPT:].split(PIECE, 1), strict=True)
        return torch.cat([checkpoint(chances, *piece, use_reentrant=False) for piece in pieces], 1)


def compared(model: Any, ids: Any) -> dict[str, Any]:
    """The same prompt, greedily: eagerly and by replay."""
    import torch

    eager, replayed = (
        generate(model, ids, new=COMPARED, do_sample=False, disable_compile=without) for without in (True, False)
    )
    counted = gemma4_compat.statistics(model).decoding
    return {
        "tokens_equal": int((eager.sequences == replayed.sequences)[:, PROMPT:].sum()),
        "tokens": ROWS * COMPARED,
        "logits_equal": all(map(torch.equal, eager.logits, replayed.logits)),
        "replayed": counted.replayed,
        "captured": counted.captured,
        "prompts_replayed": counted.prompts_replayed,
    }


if __name__ == "__main__":
    sys.exit(main())
