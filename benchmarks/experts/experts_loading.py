"""What does loading a 26B-A4B with 4-bit experts take: seconds, VRAM and host memory at its peak?

python benchmarks/experts/experts_loading.py --shape 26B-A4B-6 --out FILE.json [--ways upstream,card,host,saved]

Random weights in the real shape, 4-bit with double quantization; 26B-A4B-6 is the first 6 of the 30 layers, whose
checkpoint fits into /dev/shm. Each way in a process of its own:

upstream    without the shim, on the card: experts stay in bf16
card        inside quantize(experts=True), on the card; then saved with `save_pretrained`
host        the same, the experts of all layers in host memory
saved       the checkpoint that "card" has saved, the experts in host memory: nothing is left in bf16 to be read

Host memory is what the process holds of its own while it loads, beyond its imports (RssAnon of /proc/self/status,
every 10 ms): what is read of a mapped checkpoint is not in it. "stored" is what the experts take in 4 bits, so a
process that holds them twice shows it. Logits of all ways but upstream's must be the same, bit by bit. `--shape tiny`
runs on a CPU. Exit code 1: something raised that is not upstream's, or logits differ.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.decoding import models
from benchmarks.small_card import device

WAYS = ("upstream", "card", "host", "saved")
SHAPES = {"26B-A4B-6": "26B-A4B-6", "tiny": "tiny-26B-A4B"}


@contextlib.contextmanager
def host_memory() -> Iterator[Data]:
    """Inside, what this process holds of its own more than before: the peak, and at the end."""
    before, found, ended = _anonymous(), {"host_peak_gib": 0.0}, threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            found["host_peak_gib"] = max(found["host_peak_gib"], (_anonymous() - before) / device.GIB)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found["host_gib"] = (_anonymous() - before) / device.GIB


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no RssAnon: this needs Linux")


def build(order: Order) -> Data:
    return models.build(order["shape"], Path(order["folder"]))


def load(order: Order) -> Data:
    """The model as the way says; "card" is saved, too."""
    import torch
    from transformers import BitsAndBytesConfig, Gemma4ForConditionalGeneration

    from gemma4_compat._gemma4.quantization import experts

    folder, way = Path(order["folder"]), order["way"]
    main = device.main_device()
    placement: dict[str, Any] = {"": main}
    if way in ("host", "saved"):
        text = models.config_of(folder).get_text_config()
        away = "disk" if main == "cpu" else "cpu"
        layers = (f"model.language_model.layers.{number}.experts" for number in range(text.num_hidden_layers))
        placement |= dict.fromkeys(layers, away)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_enable_fp32_cpu_offload=True,
        llm_int8_skip_modules=[*models.skipped(folder), "router.proj"],
    )
    options: dict[str, Any] = {} if way == "saved" else {"quantization_config": config}
    checkpoint = folder / ("saved" if way == "saved" else "checkpoint")
    if main != "cpu":
        torch.zeros(1, device="cuda")  # what CUDA takes of the host is no matter of loading
    with contextlib.ExitStack() as stack:
        if way != "upstream":
            stack.enter_context(gemma4_compat.quantize(experts=True))
            stack.enter_context(gemma4_compat.quantize(offloaded=True))
        device.forget_peak()
        started = time.perf_counter()
        with host_memory() as host:
            model = Gemma4ForConditionalGeneration.from_pretrained(
                checkpoint, dtype=torch.bfloat16, device_map=placement, offload_folder=folder / way, **options
            )
            device.synchronize()
            seconds = time.perf_counter() - started
    found: Data = {"seconds": seconds, **device.memory(), **host}
    tokens = torch.arange(3, 19, device=main)[None]
    with torch.no_grad(), host_memory() as used:
        logits = model(input_ids=tokens).logits
    found |= {"host_after_a_forward_gib": host["host_gib"] + used["host_gib"], "logits": _digest(logits)}
    if way != "upstream":
        found["experts_stored_gib"] = _stored(experts.all_experts(model))
    if way == "card":
        model.save_pretrained(folder / "saved", max_shard_size="4GB")
    return found


def _stored(modules: Any) -> float:
    from gemma4_compat._gemma4.quantization.bytes import stored_bytes

    total = sum(stored_bytes(parameter) for module in modules.values() for parameter in module._parameters.values())
    return float(total) / device.GIB


def _digest(logits: Any) -> str:
    import hashlib

    import torch

    return hashlib.sha256(logits.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


ACTIONS = {"build": build, "load": load}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(SHAPES), minutes=3.0)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    if arguments.shape is None:
        parser.error("--shape is required")
    ways = arguments.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(WAYS)}")
    result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, common.shown(arguments))
    deadline = time.monotonic() + 60 * arguments.minutes
    shape = SHAPES[arguments.shape]
    work = Path(tempfile.mkdtemp(dir=models.work_folder(shape)))
    order = {"shape": shape, "folder": str(work)}
    try:
        with common.workers(Path(__file__), work) as start:
            built = start(True)({"do": "build", **order})
            if built["error"]:
                raise SystemExit(built["error"])
            result |= {"machine": built["machine"], "ways": {}}
            for way in ways:
                left = deadline - time.monotonic()
                if left < 5:
                    result["not_run"].append(way)
                    continue
                worker = start(way != "upstream")
                found = worker({"do": "load", "way": way, **order}, timeout=left)
                worker.close()
                if found["error"] is None:
                    del found["error"]
                elif way != "upstream":
                    result["problems"].append(f"{way}: {found['error']}")
                result["ways"][way] = found
                common.write(result, arguments.out)
                print(f"{way:10} {common.rounded(found)}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    said = {found["logits"] for way, found in result["ways"].items() if way != "upstream" and "logits" in found}
    if len(said) > 1:
        result["problems"].append(f"logits differ: {said}")
    common.write(result, arguments.out)
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
