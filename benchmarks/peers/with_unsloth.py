"""What a process of peers.py does that runs Unsloth: it patches transformers, so it comes before everything else.

Its stack is its own: it names the releases of transformers that it takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order


def load(order: Order) -> Data:
    """The checkpoint in 4-bit, everything on the GPU, ready to decode."""
    if order["where"] != "gpu":
        raise ValueError("Unsloth has no placement with layers on the host")
    from unsloth import FastModel

    started = time.perf_counter()
    loaded, _ = FastModel.from_pretrained(str(Path(order["folder"]) / "checkpoint"), load_in_4bit=True)
    FastModel.for_inference(loaded)
    found: Data = {"load_s": time.perf_counter() - started}
    from benchmarks.decoding import measure

    measure.use(loaded)
    return found


def adapt(order: Order) -> Data:
    """A LoRA adapter on it, by PEFT."""
    from peft import PeftModel

    from benchmarks.decoding import measure

    started = time.perf_counter()
    measure.use(PeftModel.from_pretrained(measure.model(), Path(order["folder"]) / "adapter").eval())
    return {"adapter_load_s": time.perf_counter() - started}


def turn(order: Order) -> Data:
    """One greedy answer, as the other peers are asked for it."""
    from benchmarks.decoding import measure

    return measure.turn(order | {"tokens": order["count"]})


def agree(order: Order) -> Data:
    """What it says of the prompt, against bf16."""
    from benchmarks.decoding import measure, models
    from benchmarks.peers import answers
    from benchmarks.small_card.models import PROMPT

    found = measure.logits(models.text_prompt(measure.model(), PROMPT))
    return answers.compared(Path(order["folder"]), found)


def profiled(order: Order) -> Data:
    """The kernels of its tokens."""
    from benchmarks.decoding import measure

    return measure.profiled(order)


ACTIONS: dict[str, Callable[[Order], Data]] = {
    "load": load,
    "turn": turn,
    "agree": agree,
    "profile": profiled,
    "adapt": adapt,
}

if __name__ == "__main__":
    sys.exit(common.serve(ACTIONS, stack=False))
