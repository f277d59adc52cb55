"""What does a QLoRA step take under `transformers.Trainer` and under TRL, with upstream alone and with the shim: time,
VRAM, losses; and how long a sequence fits in how little of a card?

python benchmarks/training/trainers.py --shape E2B --out FILE.json
    [--sequences 4096,2048,512,1024] [--ways streamed,trl,...]

Random weights in the real shape, 4-bit with double quantization, LoRA of rank 16 on every linear layer of the decoder,
checkpointing without reentry, bf16 autocast, AdamW, one sequence a step. Ways:

upstream    the shim is off, everything on the GPU
trl         the same under TRL's SFTTrainer, which has a loss in chunks of its own and keeps adapters in bf16
shim        upstream's placement with the shim
trl-shim    the same under TRL's SFTTrainer
chunked     with `train_fast(loss=True)`
host        table and towers on the host, loss in chunks
streamed    all layers on the host as well
windows     the same with `windows=True, products=True`
chunked-windows  as chunked, with that
fast        upstream's placement after `train_fast`; graphs are captured in the fourth step. Kernels are compiled in
            the background in the first round; `kernels` says how many graphs were fused
unsloth     unsloth's model and adapter under TRL's SFTTrainer, everything on the GPU, UNSLOTH_COMPILE_DISABLE=1; needs
            `--unsloth FOLDER`
unsloth-compiled
            the same with its compiler, which runs in the first step (`settling_s`). `--long` keeps that time out of
            the estimates for other lengths, which would otherwise be skipped

Ways with the same base share a process that loads it once; all load at the same time, and then train in turns: for
each sequence, in the order given, every way. What is not started by `--minutes` is left out, so what matters most
comes first. The same weights of the adapter and the same data everywhere, so losses are compared. The first one of
"shim" must be upstream's, bit by bit, and that of "trl-shim" TRL's; of all steps the largest difference is reported:
a GPU's backward pass of attention is not deterministic, so later ones also differ between two runs of upstream.
`--rounds` repeats it all. With `--long N` the shortest sequence is trained for N steps.

`--budget 12,8,6` (GiB): which is the longest of these sequences that each way can be trained with in so much memory?
A sequence whose tensors had a larger peak does not fit. One whose reserved memory had a smaller one does. Between the
two, a ballast tensor decides, which leaves so much to the tensors of that process, model included (a CUDA context
takes more); and so it does for the ways in `--confirm`.

`--unsloth FOLDER` names a folder with unsloth and the releases of libraries that it asks for (`pip install --target`);
its process sees that folder in place of PYTHONPATH. It decides itself what is quantized and recomputed, so its
losses are compared with nothing.

The planner's peaks need no GPU: `python benchmarks/training/trainers.py --plan FILE.json` adds them to a result.

The file is written after every measurement. A run has until `--minutes` and 90 s more; of one that did not end,
`cut_off` has the seconds of the steps that did. Exit code 1: something raised that is no lack of memory, or a first
loss differs. `--shape tiny` runs on a CPU, without memory; there a budget has no effect.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.decoding import models
from benchmarks.small_card import device
from benchmarks.training import trainers_fit as fit
from benchmarks.training import trainers_report
from gemma4_compat._doctor import environment
from gemma4_compat._engine import versions


class Way(NamedTuple):
    """Whether the shim is on, where the base is, whether the loss comes in chunks, whose trainer it is; the switch."""

    shim: bool
    where: str
    chunked: bool
    trl: bool = False
    unsloth: bool = False
    settled: int = 2
    windows: bool = False


WAYS = {
    "upstream": Way(False, "gpu", False),
    "trl": Way(False, "gpu", False, trl=True),
    "shim": Way(True, "gpu", False),
    "trl-shim": Way(True, "gpu", False, trl=True),
    "chunked": Way(True, "gpu", True),
    "host": Way(True, "host", True),
    "streamed": Way(True, "streamed", True),
    "windows": Way(True, "streamed", True, windows=True),
    "chunked-windows": Way(True, "gpu", True, windows=True),
    "fast": Way(True, "gpu", True, settled=6),
    "unsloth": Way(False, "unsloth", False, trl=True, unsloth=True),
    "unsloth-compiled": Way(False, "unsloth-compiled", False, trl=True, unsloth=True),
}
#: Says to a process that it is unsloth's.
UNSLOTH = "GEMMA4_COMPAT_BENCHMARK_UNSLOTH"
RANK = 16
#: Steps of a run unless told, and of one beside a ballast tensor; a way says how many are not timed.
STEPS, CONFIRMED = 6, 2
GRACE_S = 90
#: Of the time, what is kept for the runs beside a ballast tensor of a budget.
KEPT_S = 12
_loaded: Any = None


# In a process that has a base


def build(order: Order) -> Data:
    built = models.build(order["shape"], Path(order["folder"]))
    _tokenizer().save_pretrained(Path(order["folder"]) / "checkpoint")  # unsloth loads one
    return built


def load(order: Order) -> Data:
    """The base of all ways of this process."""
    global _loaded
    started = time.perf_counter()
    if order["where"].startswith("unsloth"):
        _loaded = _of_unsloth(order)
    else:
        _loaded = (models.load if order["shim"] else models.upstream)(order["where"], Path(order["folder"]))
        _loaded.requires_grad_(False)
    device.synchronize()
    found = {"load_s": time.perf_counter() - started, "memory": device.memory()}
    installed = {name: versions.installed(name) for name in environment.DISTRIBUTIONS}
    return found | {"versions": {name: version for name, version in installed.items() if version is not None}}


def train(order: Order) -> Data:
    """One run of a trainer on a new adapter, of the same weights each time."""
    import torch
    import transformers

    way, began = WAYS[order["way"]], time.perf_counter()
    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, given: Any, *args: Any, **kwargs: Any) -> None:
            if (sequences := given.train_batch_size * given.gradient_accumulation_steps) != 1:
                raise ValueError(f"a step has {sequences} sequences")

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            device.synchronize()
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            device.synchronize()
            seconds.append(time.perf_counter() - self.started)
            ended_steps(Path(order["folder"])).write_text(json.dumps(seconds), encoding="utf-8")

    forward = vars(_loaded).get("forward")  # TRL replaces it
    device.forget_peak()
    with device.ballast(order.get("budget")) as held:
        trainer = None
        model = _adapted(way, order["rank"]).train()
        try:
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for _, weight in sorted((name, one) for name, one in model.named_parameters() if one.requires_grad):
                    value = torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator)
                    weight.data, weight.grad = value.to(weight.device), None
            steps = order["steps"] + way.settled - WAYS["shim"].settled
            if order["way"] == "fast":
                gemma4_compat.train_fast(model, max_tokens=order["sequence"])
            elif way.shim:
                common.parts(model, loss=way.chunked, windows=way.windows, products=way.windows)
            vocabulary = min(250_000, model.config.get_text_config().vocab_size - 16)
            generator = torch.Generator().manual_seed(1)
            rows = torch.randint(3, vocabulary, (steps, order["sequence"]), generator=generator).tolist()
            data = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in rows]
            trainer = (_of_trl if way.trl else _of_transformers)(model, settings(order, steps), data, Clock())
            setup = time.perf_counter() - began
            trainer.train()
            losses = [f"{entry['loss']:.9g}" for entry in trainer.state.log_history if "loss" in entry]
            memory = {name: value and value - held for name, value in device.memory().items()}
            found = {"settling_s": seconds[: way.settled], "seconds": seconds[way.settled :], "setup_s": setup}
            if order["way"] == "fast":
                counted = gemma4_compat.statistics(model).training
                found["kernels"] = {"captured": counted.captured, "fused": counted.fused}
            found |= {"memory": memory, "losses": losses}
            trained = [one for one in model.parameters() if one.requires_grad]
            found |= {"adapters": sorted({str(one.dtype) for one in trained})}
            return found | {"trained": sum(one.numel() for one in trained)}
        finally:
            if not way.unsloth:
                model.unload()
            vars(_loaded).pop("forward", None)
            if forward is not None:
                _loaded.forward = forward
            del trainer, model
            device.forget_peak()  # the others need the memory, too


def settings(order: Order, steps: int) -> Data:
    """Of every trainer: where a default of theirs differs, what a step is would differ."""
    return {
        "output_dir": str(Path(order["folder"]) / "trainer"),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,  # unsloth's default is 2
        "max_steps": steps,
        "learning_rate": 1e-4,
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
        "use_cpu": device.main_device() == "cpu",
        "dataloader_pin_memory": device.main_device() != "cpu",
    }


def _adapted(way: Way, most: int) -> Any:
    """The base of this process with an adapter; unsloth's has one already."""
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._plan.training_step import TARGETS

    if way.unsloth:
        return _loaded
    rank = min(RANK, most)
    return get_peft_model(_loaded, LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS))


def _of_unsloth(order: Order) -> Any:
    """A 4-bit base with an adapter of the same layers as everywhere, by unsloth's calls."""
    import torch
    from unsloth import FastModel

    from gemma4_compat._plan.training_step import TARGETS

    model, _ = FastModel.from_pretrained(
        str(Path(order["folder"]) / "checkpoint"),
        max_seq_length=order["longest"],
        dtype=torch.bfloat16,
        load_in_4bit=True,
        local_files_only=True,
    )
    rank = min(RANK, order["rank"])
    return FastModel.get_peft_model(
        model,
        r=rank,
        lora_alpha=rank,
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )


def _of_transformers(model: Any, given: Data, data: list[Data], clock: Any) -> Any:
    import transformers

    arguments = transformers.TrainingArguments(**given)
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock])


def _of_trl(model: Any, given: Data, data: list[Data], clock: Any) -> Any:
    import pyarrow
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    if os.environ.get(UNSLOTH):  # what is recomputed, it has decided
        given = {name: value for name, value in given.items() if not name.startswith("gradient_checkpointing")}
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in data]  # it makes masks itself
    return SFTTrainer(
        model=model,
        args=SFTConfig(**given, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}),
        train_dataset=Dataset(pyarrow.Table.from_pylist(rows), fingerprint="rows"),
        processing_class=_tokenizer(),
        callbacks=[clock],
    )


def _tokenizer() -> Any:
    """TRL's trainers need one; the tokens here are numbers already. It pads with the token that Gemma 4 pads with."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    names = {f"{word[1:4]}_token": word for word in words}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def ended_steps(folder: Path) -> Path:
    """Where a run keeps the seconds of each step that has ended, for the case that it does not end itself."""
    return folder / "ended_steps.json"


ACTIONS = {"build": build, "load": load, "train": train}


# In the process that asks


class Run:
    """A process for each base, what it is told, and the result so far."""

    def __init__(self, arguments: Any, result: Data, work: Path, start: Callable[..., common.Worker]) -> None:
        self.arguments, self.result, self.start = arguments, result, start
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.order: Order = {"shape": arguments.shape, "folder": str(work), "rank": arguments.rank}
        self.workers: dict[tuple[bool, str], common.Worker] = {}
        self.took: dict[str, float] = {}

    def environment(self, base: tuple[bool, str], work: str) -> dict[str, str]:
        """What a process with this base is told by it."""
        if not base[1].startswith("unsloth"):
            return {}
        site = str(self.arguments.unsloth.resolve())
        return {
            UNSLOTH: "1",
            "PYTHONPATH": site,
            "UNSLOTH_COMPILE_DISABLE": str(int(base[1] == "unsloth")),
            "UNSLOTH_COMPILE_LOCATION": f"{work}/{base[1]}",
            "HF_HUB_OFFLINE": "1",
        }

    def build(self) -> None:
        """The checkpoint; meanwhile every process imports its libraries, and then loads its base."""
        work = self.order["folder"]
        bases = list(dict.fromkeys((WAYS[name].shim, WAYS[name].where) for name in self.arguments.ways))
        self.workers = {base: self.start(base[0], **self.environment(base, work)) for base in bases}
        builder = self.start(True)
        built = builder({**self.order, "do": "build"}, timeout=GRACE_S + 60 * self.arguments.minutes)
        builder.close()
        if built["error"] is not None:
            raise SystemExit(f"the checkpoint could not be built: {built['error']}")
        self.result["machine"], self.result["build_s"] = built["machine"], built["build_s"]
        with concurrent.futures.ThreadPoolExecutor(len(bases)) as pool:
            for base, found in zip(bases, pool.map(self.load, bases), strict=True):
                name = f"{'shim' if base[0] else 'upstream'}, {base[1]}"
                self.result["loads"][name] = found
                if found["error"] is not None:
                    self.lost(f"load {name}", found["error"])
                    self.workers.pop(base).close()
        trained_with = [found["versions"] for found in self.result["loads"].values() if found["error"] is None]
        if trained_with and all(one == trained_with[0] for one in trained_with):  # not what built the checkpoint
            self.result["machine"]["versions"] = {name: trained_with[0][name] for name in built["machine"]["versions"]}
        common.write(self.result, self.arguments.out)

    def load(self, base: tuple[bool, str]) -> Data:
        """Of one process."""
        order = {**self.order, "do": "load", "shim": base[0], "where": base[1]}
        order["longest"] = max(self.arguments.sequences)
        try:
            return self.workers[base](order, timeout=self.deadline - time.monotonic() + GRACE_S)
        except SystemExit as error:  # it could not import its libraries, which is a result, too
            return {"error": str(error)}

    def train(self, way: str, sequence: int, name: str, **more: Any) -> Data | None:
        """What a run gave; None where it was not started, or failed, which is kept."""
        kept = 0 if "budget" in more else KEPT_S * len(self.arguments.budget)
        left, kind = self.deadline - kept - time.monotonic(), f"{way} {more['steps']}"
        if left <= self.took.get(kind, 0.0):
            self.result["not_run"].append(name)
            return None
        worker = self.workers.get(WAYS[way][:2])
        if worker is None or worker.process.poll() is not None:
            self.lost(name, "the process with its base has ended")
            return None
        began = time.monotonic()
        steps = ended_steps(Path(self.order["folder"]))
        steps.unlink(missing_ok=True)
        found = worker({**self.order, "do": "train", "way": way, "sequence": sequence, **more}, timeout=left + GRACE_S)
        self.took[kind] = max(self.took.get(kind, 0.0), time.monotonic() - began)
        error = found.pop("error")
        if error is not None:
            self.result["cut_off"][name] = json.loads(steps.read_text(encoding="utf-8")) if steps.exists() else []
            self.lost(name, error)
            return None
        return found

    def lost(self, name: str, error: str) -> None:
        """Keep what failed; it is a problem unless memory was lacking."""
        self.result["out"][name] = error
        if "OutOfMemoryError" not in error:
            self.result["problems"].append(f"{name}: {error}")
        common.write(self.result, self.arguments.out)
        print(f"{name}: {error}"[:150], flush=True)


def measured(arguments: Any, options: list[str]) -> Data:
    result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, options, arguments.note)
    result |= {
        "settings": {
            "rank": arguments.rank,
            "steps": arguments.steps,
            "settled": {way: WAYS[way].settled for way in arguments.ways},
        },
        "loads": {},
        "runs": [],
    }
    result |= {"out": {}, "cut_off": {}, "fits": {}}
    work_in = arguments.work or models.work_folder(arguments.shape)
    with common.temporary("gemma4-trainers-", work_in) as work, common.workers(Path(__file__), work) as start:
        run = Run(arguments, result, work, start)
        run.build()
        for number in range(arguments.rounds):
            for sequence in arguments.sequences:
                for way in arguments.ways:
                    longer = arguments.long if number == 0 and sequence == min(arguments.sequences) else None
                    name = f"{way}, {sequence} tokens"
                    found = run.train(way, sequence, name, steps=max(arguments.steps, longer or 0))
                    if found is None:
                        continue
                    result["runs"].append({"round": number, "way": way, "sequence": sequence, **found})
                    common.write(result, arguments.out)
                    peak = found["memory"]["peak_reserved_gib"]
                    print(f"{name:28} {statistics.median(found['seconds']):.3f} s, {peak} GiB", flush=True)
        for budget in arguments.budget:
            result["fits"][f"{budget:g}"] = fitting(run, budget)
            common.write(result, arguments.out)
    compare(result)
    common.write(result, arguments.out)
    return result


def fitting(run: Run, budget: float) -> Data:
    """By way, the longest sequence that can be trained in ``budget`` GiB, and how that is known."""
    found: Data = {}
    for way in run.arguments.ways:
        peaks = fit.peaks(run.result, way)
        if not peaks:
            continue
        found[way] = {"longest": None, "by": "peaks"}
        for sequence, sure in fit.candidates(peaks, budget):
            if sure and way not in run.arguments.confirm:
                found[way] = {"longest": sequence, "by": "peaks"}
                break
            name = f"{way}, {sequence} tokens in {budget:g} GiB"
            tried = run.train(way, sequence, name, steps=CONFIRMED, budget=budget)
            if tried is not None:
                found[way] = {"longest": sequence, "by": "ballast", "memory": tried["memory"]}
                print(f"{name}: {tried['memory']['peak_reserved_gib']} GiB", flush=True)
                break
            if name in run.result["out"]:
                found[way]["by"] = "ballast"
            elif sure:  # no time to confirm it
                found[way] = {"longest": sequence, "by": "peaks"}
                break
    return found


def compare(result: Data) -> None:
    """Keep the largest difference of losses to upstream's (of TRL, to TRL's), by way and sequence.

    Of "shim" and "trl-shim" the first must be equal.
    """
    plain = {"trl": "upstream", "trl-shim": "trl"}
    by = {(run["way"], run["sequence"], len(run["losses"])): run["losses"] for run in result["runs"]}
    result["differences"] = found = {}
    for run in result["runs"]:
        way = run["way"]
        other = by.get((plain.get(way, "upstream"), run["sequence"], len(run["losses"])))
        if way == "upstream" or WAYS[way].unsloth or other is None:
            continue
        pairs = [(float(one), float(two)) for one, two in zip(run["losses"], other, strict=True)]
        worst = max(abs(one - two) / abs(two) for one, two in pairs)
        key = f"{way}, {run['sequence']} tokens"
        found[key] = max(found.get(key, 0.0), worst)
        if way in ("shim", "trl-shim") and run["losses"][0] != other[0]:
            result["problems"].append(f"{key}: the first loss is {run['losses'][0]}, without the shim {other[0]}")


# Without a GPU, from a result


def planned(file: Path) -> Data:
    """Add to each run what `plan_training` expects of it, in the stack that is installed here.

    It does not know the loss of TRL.
    """
    result: Data = json.loads(file.read_text(encoding="utf-8"))
    ways = {(WAYS[run["way"]], run["sequence"]) for run in result["runs"]}
    kinds = {(way.where, sequence, way.chunked, way.windows) for way, sequence in ways if not way.trl}
    with common.temporary("gemma4-trainers-", None) as work:
        fit.write_config(result["shape"], work)
        peaks = {kind: fit.planned_gib(work, *kind, rank=result["settings"]["rank"]) for kind in sorted(kinds)}
    for run in result["runs"]:
        way = WAYS[run["way"]]
        if not way.trl:
            run["planned_gib"] = peaks[way.where, run["sequence"], way.chunked, way.windows]
    result["planned_with"] = device.machine()["versions"]
    common.write(result, file)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=4.0)
    parser.add_argument("--ways", default="streamed,host,chunked,trl,upstream,shim,trl-shim", help="in this order")
    parser.add_argument("--sequences", default="4096,2048,512,1024", help="tokens of a sequence, in this order")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--rounds", type=int, default=1, help="how often all ways are run in turn")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run; the first two are not timed")
    parser.add_argument("--long", type=int, help="steps of the shortest sequence in the first round")
    parser.add_argument("--budget", help="GiB of a card, with commas: what fits in each")
    parser.add_argument("--confirm", default="streamed", help="ways that are run beside a ballast tensor anyway")
    parser.add_argument("--unsloth", type=Path, help="a folder with unsloth and its libraries")
    parser.add_argument("--plan", type=Path, help="no measurement: add the planner's peaks to this result")
    arguments = parser.parse_args(argv)
    if arguments.child:
        if os.environ.get(UNSLOTH):  # it wants to be imported before what it changes
            import unsloth  # noqa: F401
        return common.serve(ACTIONS)
    if arguments.plan is not None:
        print(trainers_report.table(planned(arguments.plan)))
        return 0
    if arguments.shape is None:
        parser.error("--shape is required")
    options = common.shown(arguments)
    for option in ("ways", "confirm"):
        common.chosen(parser, arguments, option, WAYS)
    if any(WAYS[way].unsloth for way in arguments.ways) and arguments.unsloth is None:
        parser.error("the ways of unsloth need --unsloth FOLDER")
    if arguments.steps <= WAYS["shim"].settled:
        parser.error("--steps must be more than the two that are not timed")
    arguments.sequences = [int(number) for number in arguments.sequences.split(",")]
    arguments.budget = [float(number) for number in (arguments.budget or "").split(",") if number]
    result = measured(arguments, options)
    print(f"\n{trainers_report.table(result)}")
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
