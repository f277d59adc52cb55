"""What does a QLoRA step under `transformers.Trainer` take, with upstream alone and with the shim: time, VRAM, losses?

python benchmarks/trainers.py --shape E2B --out FILE.json [--sequences 512,2048,4096] [--ways upstream,shim,...]

Random weights in the real shape, 4-bit with double quantization, LoRA of rank 16 on every linear layer of the decoder,
checkpointing without reentry, bf16 autocast, AdamW, one sequence a step. Ways, each in a process of its own:

upstream    the shim is off, everything on the GPU
shim        the same placement with the shim
chunked     the same with `gemma4_compat.chunked_loss`
host        table and towers on the host, loss in chunks
streamed    all layers on the host, too

The same weights of the adapter and the same data everywhere, so losses are compared. The first one of "shim" must be
upstream's, bit by bit; of all steps the largest difference is reported: a GPU's backward pass of attention is not
deterministic, so later ones differ between two runs of upstream, too. `--rounds` repeats all ways in turn. With
`--long N` the shortest sequence is trained for N steps. The file is written after every measurement. Exit code 1:
something raised that is no lack of memory, or a first loss differs. `--shape tiny` runs on a CPU, without memory.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import common  # noqa: E402
import graph_decoding_models as models  # noqa: E402  (imports gemma4_compat before the libraries)
import small_card_device as device  # noqa: E402
import trainers_report  # noqa: E402
from common import Data, Order  # noqa: E402

import gemma4_compat  # noqa: E402

#: By name: whether the shim is on, where the base is, and whether the loss comes in chunks.
WAYS = {
    "upstream": (False, "gpu", False),
    "shim": (True, "gpu", False),
    "chunked": (True, "gpu", True),
    "host": (True, "host", True),
    "streamed": (True, "streamed", True),
}
RANK = 16
#: Steps before those that are timed, and all of a short run.
SETTLED, STEPS = 3, 9
GRACE_S = 90
_loaded: Any = None


def build(order: Order) -> Data:
    return models.build(order["shape"], Path(order["folder"]))


def train(order: Order) -> Data:
    """One run of Trainer on a new adapter, of the same weights each time."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._planner.training_step import TARGETS

    global _loaded
    if _loaded is None:
        _loaded = (models.upstream if order["way"] == "upstream" else models.load)(
            order["where"], Path(order["folder"])
        )
        _loaded.requires_grad_(False)
    rank = min(RANK, order["rank"])
    model = get_peft_model(_loaded, LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS)).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, weight in sorted((name, weight) for name, weight in model.named_parameters() if weight.requires_grad):
            weight.data = torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator).to(weight.device)
    if order["way"] != "upstream":
        gemma4_compat.chunked_loss(model, enabled=order["chunked"])
    vocabulary = min(250_000, model.config.get_text_config().vocab_size - 16)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, vocabulary, (order["steps"], order["sequence"]), generator=generator)
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]
    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if len(seconds) == SETTLED:
                device.forget_peak()
            device.synchronize()
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            device.synchronize()
            seconds.append(time.perf_counter() - self.started)

    settings = transformers.TrainingArguments(
        output_dir=str(Path(order["folder"]) / "trainer"),
        per_device_train_batch_size=1,
        max_steps=order["steps"],
        learning_rate=1e-4,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        optim="adamw_torch",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        use_cpu=device.main_device() == "cpu",
        dataloader_pin_memory=device.main_device() != "cpu",
    )
    device.forget_peak()
    trainer = transformers.Trainer(model=model, args=settings, train_dataset=data, callbacks=[Clock()])
    try:
        trainer.train()
        losses = [f"{entry['loss']:.9g}" for entry in trainer.state.log_history if "loss" in entry]
        return {"seconds": seconds[SETTLED:], "memory": device.memory(), "losses": losses}
    finally:
        model.unload()
        del trainer, model
        gc.collect()


ACTIONS = {"build": build, "train": train}


# In the process that asks


def measured(arguments: Any, options: list[str]) -> Data:
    result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, options, arguments.note)
    result |= {"settings": {"rank": arguments.rank, "steps": STEPS, "settled": SETTLED}, "runs": [], "out": {}}
    deadline = time.monotonic() + 60 * arguments.minutes
    work_in = arguments.work or models.work_folder(arguments.shape)
    with common.temporary("gemma4-trainers-", work_in) as work, common.workers(Path(__file__), work) as start:
        order: Order = {"shape": arguments.shape, "folder": str(work), "rank": arguments.rank}
        builder = start(True)
        built = builder({**order, "do": "build"}, timeout=GRACE_S + 60 * arguments.minutes)
        builder.close()
        if built["error"] is not None:
            raise SystemExit(f"the checkpoint could not be built: {built['error']}")
        result["machine"] = built["machine"]
        for number in range(arguments.rounds):
            for way in arguments.ways:
                shim, where, chunked = WAYS[way]
                worker = None
                for sequence in arguments.sequences:
                    name = f"{way}, {sequence} tokens"
                    if time.monotonic() > deadline:
                        result["not_run"].append(name)
                        continue
                    steps = arguments.long if number == 0 and sequence == min(arguments.sequences) else STEPS
                    worker = worker or start(shim)
                    more = {"do": "train", "way": way, "where": where, "chunked": chunked}
                    found = worker(
                        {**order, **more, "sequence": sequence, "steps": max(STEPS, steps)},
                        timeout=deadline - time.monotonic() + GRACE_S,
                    )
                    error = found.pop("error")
                    if error is None:
                        result["runs"].append({"round": number, "way": way, "sequence": sequence, **found})
                    else:
                        result["out"][name] = error
                        if "OutOfMemoryError" not in error:
                            result["problems"].append(f"{name}: {error}")
                        if worker.process.poll() is not None:
                            worker = None
                    common.write(result, arguments.out)
                    took = statistics.median(found["seconds"]) if error is None else None
                    peak = found["memory"]["peak_reserved_gib"] if error is None else None
                    print(f"{name:28} {took} s, {peak} GiB {error or ''}"[:150], flush=True)
                if worker is not None:
                    worker.close()
    compare(result)
    common.write(result, arguments.out)
    return result


def compare(result: Data) -> None:
    """Keep the largest difference of losses to upstream's, by way and sequence; of "shim" the first must be equal."""
    expected = {
        (run["sequence"], len(run["losses"])): run["losses"] for run in result["runs"] if run["way"] == "upstream"
    }
    result["differences"] = found = {}
    for run in result["runs"]:
        other = expected.get((run["sequence"], len(run["losses"])))
        if run["way"] == "upstream" or other is None:
            continue
        pairs = [(float(one), float(two)) for one, two in zip(run["losses"], other, strict=True)]
        worst = max(abs(one - two) / abs(two) for one, two in pairs)
        key = f"{run['way']}, {run['sequence']} tokens"
        found[key] = max(found.get(key, 0.0), worst)
        if run["way"] == "shim" and run["losses"][0] != other[0]:
            result["problems"].append(f"{key}: the first loss is {run['losses'][0]}, upstream's {other[0]}")


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=4.0)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--sequences", default="512,2048,4096", help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--rounds", type=int, default=1, help="how often all ways are run in turn")
    parser.add_argument("--long", type=int, default=STEPS, help="steps of the shortest sequence in the first round")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    if arguments.shape is None:
        parser.error("--shape is required")
    options = common.shown(arguments)
    arguments.ways = [name for name in arguments.ways.split(",") if name]
    if unknown := [name for name in arguments.ways if name not in WAYS]:
        parser.error(f"unknown ways: {', '.join(unknown)}; known: {', '.join(WAYS)}")
    arguments.sequences = [int(number) for number in arguments.sequences.split(",")]
    result = measured(arguments, options)
    print(f"\n{trainers_report.table(result)}")
    for problem in result["problems"]:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
