"""Does a long context fit into a small card, how long is the prompt, and how fast are the tokens at its end?

python benchmarks/small_card/contexts.py --shape E2B --budget 4 --out benchmarks/results/DATE-DEVICE/contexts-E2B.json

A text of --tokens tokens, the last ones decoded, after ``decode_fast``, in 4 bits with random weights: E2B and E4B
with table and towers in host memory (4 and 8 GiB), the 26B-A4B with all experts there (12 GiB). A tensor leaves
--budget GiB of the card to the rest. Each way runs three times; graphs are captured and fused in the first two:

chosen        without ``prefill_chunk_size``: ``decode_fast`` reads in chunks where the prompt does not fit
512, 1024...  with that ``prefill_chunk_size``

Of each: seconds to the first token, tokens a second after it, the peak of the tensors beside the ballast, and what the
planner says of the prompt and of decoding. ``--shape tiny`` runs on a CPU, where a tape stands in for CUDA graphs.
Exit code 1: something raised, or a way ran out of memory.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat  # before the others
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import models
from benchmarks.experts import models as expert_models
from benchmarks.small_card import device
from benchmarks.small_card.models import Clock

SHAPES = ("E2B", "E4B", "26B-A4B", "tiny", "tiny-26B-A4B")
CHOSEN = "chosen"
WAYS = (CHOSEN, "512", "1024", "2048")
NEW = 128
#: Texts of each way.
RUNS = 3


def loaded(shape: str, folder: Path) -> Any:
    """The model, in 4 bits, as the docstring says."""
    if shape.endswith("26B-A4B"):
        name = "tiny" if shape.startswith("tiny") else shape
        return expert_models.placed(name, expert_models.hosted_experts(name), "experts").eval()
    weights: dict[str, Any] = {}
    models.build(shape, folder, weights)
    return models.load("gpu" if shape == "tiny" else "host", folder, weights)


def planned(model: Any, context: int, prompt: int, chunk: int | None) -> Data:
    """GiB at most while the prompt is read, and while tokens are decoded."""
    from gemma4_compat._generation.prompts import chunks
    from gemma4_compat._memory.formulas import Load
    from gemma4_compat._memory.use import use_of

    blueprint, share = chunks.shapes(model)
    load = Load(context=context, prompt=prompt, prefill_chunk=chunk, fast=True)
    found = use_of(blueprint, share, load, budget=1 << 62)
    return {"prompt_gib": found.prefill / device.GIB, "decoding_gib": (found.decode - found.experts) / device.GIB}


def measured(model: Any, way: str, tokens: int, new: int, held: float) -> Data:
    """One text."""
    prompt = models.text_prompt(model, tokens - new)
    options: Data = {} if way == CHOSEN else {"prefill_chunk_size": int(way)}
    clock, counted = Clock(), gemma4_compat.statistics(model).decoding
    before = counted.prompts_in_chunks, counted.prompts_replayed
    device.forget_peak()
    device.synchronize()
    began = time.perf_counter()
    model.generate(**prompt, min_new_tokens=new, max_new_tokens=new, do_sample=False, streamer=clock, **options)
    found: Data = {
        "first_token_s": clock.times[1] - began,
        "tokens_s": clock.tokens_per_second,
        "in_chunks": counted.prompts_in_chunks - before[0],
        "replayed_forwards": counted.prompts_replayed - before[1],
    }
    memory = device.memory()
    return found | {name: None if size is None else size - held for name, size in memory.items()}


def run(model: Any, arguments: Any, result: Data) -> None:
    """All ways, within the budget; an error is a problem of its way."""
    import torch

    for way in arguments.ways:
        chunk = None if way == CHOSEN else int(way)
        entry: Data = {
            "planned": planned(model, arguments.tokens, arguments.tokens - arguments.new, chunk),
            "runs": [],
        }
        result["ways"][way] = entry
        gemma4_compat.decode_fast(model, enabled=False)
        gemma4_compat.decode_fast(model)
        with device.ballast(arguments.budget) as held:
            for _ in range(RUNS):
                try:
                    with torch.no_grad():
                        entry["runs"].append(measured(model, way, arguments.tokens, arguments.new, held))
                except Exception as error:  # noqa: BLE001  # the other ways are measured anyway
                    text = " ".join(str(error).split())
                    result["problems"].append(f"{way}: {type(error).__name__}: {text:.300}")
                    break
        common.write(result, arguments.out)
        print(f"{way:8}", common.rounded(entry), flush=True)


def main(argv: list[str] | None = None) -> int:
    import torch

    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins import tape

    parser = common.parser(__doc__, SHAPES, minutes=8)
    parser.add_argument("--budget", type=float, help="GiB of the card (default: all)")
    parser.add_argument("--tokens", type=int, default=131_072, help="of the text, prompt and answer")
    parser.add_argument("--new", type=int, default=NEW, help="tokens of the answer")
    parser.add_argument("--ways", default=",".join(WAYS), help="separated by commas")
    arguments = parser.parse_args(argv)
    arguments.ways = arguments.ways.split(",")
    options = [*common.shown(arguments)] if argv is None else list(argv)
    result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, options, arguments.note)
    result |= {"machine": device.machine(), "budget_gib": arguments.budget, "tokens": arguments.tokens, "ways": {}}
    stand_in = contextlib.nullcontext() if torch.cuda.is_available() else tape.standing_in(RECORDERS)
    folder = arguments.work or Path("/dev/shm")
    with common.temporary("contexts-", folder) as work:
        model = loaded(arguments.shape, work)
        device.forget_peak()
        result["loaded"] = device.memory()
        with stand_in:
            run(model, arguments, result)
    common.write(result, arguments.out)
    return common.ended(result)


if __name__ == "__main__":
    raise SystemExit(main())
