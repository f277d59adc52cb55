"""What does the loss in chunks save, and how far is it from the plain one?

python benchmarks/training/chunked_loss.py [--json FILE] [--tokens 2048] [--rounds 3]

On the CPU. Memory: the peak of one forward and backward pass of a language model with a vocabulary of 262,144 and a
frozen head in bfloat16, above what the process held before; a process for each step, plain and in chunks in turns.
Exactness: the loss and every gradient of tiny models of all classes in float32 and bfloat16, the two losses against
each other and, in bfloat16, both against float32. How fast it is on a GPU is not measured here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

VOCABULARY = 262_144
GIB = 2**30
#: Tokens of a sequence of the memory part.
SEQUENCE = 128
#: Tokens of a chunk of the exactness part, so that there are several chunks.
CHUNK = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=("plain", "chunked"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(peak(arguments.tokens, chunked=arguments.child == "chunked")))
        return 0
    result = {
        "torch": version("torch"),
        "transformers": version("transformers"),
        "memory": memory(arguments.tokens, arguments.rounds),
        "exactness": exactness(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 0


def memory(tokens: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"plain": [], "chunked": []}
    for turn in range(rounds):
        for kind in sorted(found, reverse=bool(turn % 2)):
            command = [sys.executable, __file__, "--child", kind, "--tokens", str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[kind].append(json.loads(done.stdout.splitlines()[-1])["peak"] / GIB)
    medians = {kind: statistics.median(values) for kind, values in found.items()}
    return {
        "tokens": tokens,
        "vocabulary": VOCABULARY,
        "logits_gib": tokens * VOCABULARY * 2 / GIB,
        "peak_gib": {kind: round(value, 3) for kind, value in medians.items()},
        "rounds_gib": {kind: [round(value, 3) for value in values] for kind, values in found.items()},
        "ratio": round(medians["plain"] / medians["chunked"], 1),
    }


def peak(tokens: int, *, chunked: bool) -> dict[str, float]:
    """Bytes at the peak of a step above those before it, and the loss."""
    import torch
    import transformers

    import gemma4_compat
    from gemma4_compat._lab import tiny_configs

    shape = {**tiny_configs.text_shape(), "vocab_size": VOCABULARY, "num_kv_shared_layers": 0}
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(**shape, hidden_size_per_layer_input=0)
    model = transformers.Gemma4ForCausalLM(config).to(torch.bfloat16).train()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.endswith("up_proj.weight"))
    gemma4_compat.train_fast(model, loss=chunked, mlp=False, windows=False, products=False, graphs=False)
    ids = torch.randint(3, VOCABULARY, (tokens // SEQUENCE, SEQUENCE))  # short: attention takes next to nothing
    model(input_ids=ids[:, :4], labels=ids[:, :4]).loss.backward()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the peak, begins anew
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"peak": _resident("VmHWM") - before, "loss": loss.item()}


def _resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def exactness() -> dict[str, Any]:
    import torch

    from gemma4_compat._lab import tiny_configs
    from gemma4_compat._lab.workspace import Workspace
    from gemma4_compat._training import chunks

    chunks.LOGITS_BYTES = tiny_configs.VOCABULARY * 2 * CHUNK
    chunks.BLOCK_BYTES = tiny_configs.VOCABULARY * 4 * 2
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace.build(Path(folder) / "gemma4")
        unified = workspace.unified()
        models = {"Gemma4ForConditionalGeneration": (workspace, workspace.load)}
        models["Gemma4ForCausalLM"] = (workspace, workspace.load_text)
        if unified is not None:
            models["Gemma4UnifiedForConditionalGeneration"] = (unified, unified.load)
            models["Gemma4UnifiedForCausalLM"] = (unified, unified.load_text)
        for name, (place, load) in models.items():
            batch = place.inputs(text_only=name.endswith("CausalLM"))
            steps = {
                (dtype, chunked): _step(load().to(dtype), batch, chunked=chunked)
                for dtype in (torch.float32, torch.bfloat16)
                for chunked in (False, True)
            }
            result[name] = {
                str(dtype).removeprefix("torch."): {
                    "loss": _relative(steps[dtype, False][0], steps[dtype, True][0]),
                    "gradients": _off(steps[dtype, False][1], steps[dtype, True][1]),
                }
                for dtype in (torch.float32, torch.bfloat16)
            }
            truth = steps[torch.float32, False][1]
            result[name]["bfloat16"]["plain_from_float32"] = _off(truth, steps[torch.bfloat16, False][1])
            result[name]["bfloat16"]["chunked_from_float32"] = _off(truth, steps[torch.bfloat16, True][1])
    return result


def _step(model: Any, batch: dict[str, Any], *, chunked: bool) -> tuple[float, dict[str, Any]]:
    import gemma4_compat

    gemma4_compat.train_fast(model.train(), loss=chunked, mlp=False, windows=False, products=False, graphs=False)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    return loss.item(), {
        name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None
    }


def _relative(right: float, found: float) -> float:
    return abs(found - right) / abs(right)


def _off(right: dict[str, Any], found: dict[str, Any]) -> float:
    """The norm of the difference of all gradients, of the norm of all of them."""
    total = sum(float(gradient.norm()) ** 2 for gradient in right.values())
    return (sum(float((right[name] - found[name]).norm()) ** 2 for name in right) / total) ** 0.5


if __name__ == "__main__":
    raise SystemExit(main())
