"""What an assistant model gives and costs, on a CPU, for docs/DECODING_MEASURED.md. Prints two tables.

python benchmarks/decoding/assistants.py

* How many drafts are accepted, in closed form: drawn from the assistant's distribution, as gemma4_compat does, or its
  likeliest token. The model's logits are random (standard deviation 3 over 2,000 tokens, which gives a likeliest token
  of about a third); the assistant's are the same with noise.
* Of how many prompts greedy text with an assistant is that without one, in float32 and bf16, on the tiny model of the
  tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import gemma4_compat  # noqa: F401
from gemma4_compat._lab.workspace import Workspace


def acceptance(noise: float, temperature: float, rounds: int) -> tuple[float, float]:
    """Probability that a draft is accepted: drawn, and the likeliest."""
    import torch

    torch.manual_seed(0)
    logits = 3 * torch.randn(rounds, 2000)
    p = (logits / temperature).softmax(-1)
    q = ((logits + noise * torch.randn_like(logits)) / temperature).softmax(-1)
    drawn = torch.minimum(p, q).sum(-1).mean()
    likeliest = p.gather(-1, q.argmax(-1, keepdim=True)).mean()
    return float(drawn), float(likeliest)


def equal_texts(prompts: int, tokens: int) -> dict[str, int]:
    """Dtype -> how many prompts have the same greedy text with an assistant and without."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        space = Workspace.build(Path(folder) / "workspace")
        model, assistant = space.load(), space.load_assistant()
        found = {}
        for dtype in (torch.bfloat16, torch.float32):
            model, assistant = model.to(dtype), assistant.to(dtype)
            generator = torch.Generator().manual_seed(1)
            found[str(dtype)] = 0
            for _ in range(prompts):
                ids = torch.randint(3, 240, (1, 12), generator=generator)
                options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
                texts = [model.generate(ids, **options, assistant_model=one) for one in (None, assistant)]
                found[str(dtype)] += int(texts[0].equal(texts[1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    print("| noise | temperature | drawn | likeliest |\n|---:|---:|---:|---:|")
    for noise in (0.0, 0.5, 1.0, 2.0):
        for temperature in (0.5, 1.0):
            drawn, likeliest = acceptance(noise, temperature, 200)
            print(f"| {noise} | {temperature} | {drawn:.0%} | {likeliest:.0%} |")
    for dtype, equal in equal_texts(options.prompts, options.tokens).items():
        print(f"{dtype}: {equal} of {options.prompts} texts of {options.tokens} tokens are those without an assistant")


if __name__ == "__main__":
    main()
