"""What does a 26B-A4B cost whose experts stay in host memory, of which a token reads those that it hits: bits, VRAM,
tokens a second, bytes a token, against experts on the card and against streaming whole layers?

python benchmarks/experts/experts.py --shape 26B-A4B --out FILE.json
    [--cases card,experts,...] [--parts bits,memory,...]

All 30 layers in the real shape, 4-bit with double quantization, random weights, without the model in bf16. Cases:

card          everything on the card: what the others are compared with, so it comes first
experts       the experts of all layers in host memory
layers        all layers in host memory; the experts of a layer stay there, the rest of it is streamed
whole         the same, and all experts travel, as before there was a lookup
disk          the experts of all layers on disk: memory-mapped files in TMPDIR, read for every token
budget:N      experts on the card as far as N GiB go (6, 8, 12, 16) with prompts in chunks, the others in host memory
upstream      everything on the card and experts in bf16, as upstream loads them; alone in a process of its own, in
              which the shim is off: GEMMA4_COMPAT_DISABLE=all

Parts of each: "bits" (three forwards, an image prompt, a generate; against the card), "speed" (tokens a second, eager
and replayed, without the kernel that reads experts, too, and the share of the bus), "profile" (what the time of a step
goes to), "memory" (prefill of 2,048 and 8,192 tokens, at once and in chunks of 1,024, or 512 with 6 GiB: peak, what
the planner says of it, and seconds), "training" (steps of QLoRA, of card, experts and layers: seconds, peak, and the
first loss, against the card), "cold" (of disk: forwards of a token while nothing of the files is in memory, where the
system lets go of them, and what reading them takes by itself). The file is written after each of them, and nothing is
begun after --minutes. With `--add-to FILE`, what an earlier run on the same kind of machine has is taken from it.
`--shape tiny` also runs on a CPU. Only "kept", in "speed", keeps experts on the card: the other cases
call a streamer of ours for each token. Exit code 1: something raised, or bits differ.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import kernel_times as kernels
from benchmarks.experts import (
    mapped_files,
    models,
)
from benchmarks.small_card import device
from benchmarks.small_card.device import GIB
from benchmarks.small_card.models import Clock, image_prompt
from gemma4_compat._graphs import fused_steps

CASES = ("card", "experts", "layers", "whole", "budget:8", "budget:6", "budget:12", "budget:16", "disk", "upstream")
#: Prompts of thousands of tokens come last: the model keeps their static cache, and a step reads all of it.
PARTS = ("bits", "speed", "profile", "memory", "training", "cold")
PREFILLS = (2048, 8192)
CHUNK = 1024
#: With less than 8 GiB.
SMALL_CHUNK = 512
PROMPT = 64
#: Tokens whose logits are compared; replayed steps are fused among them.
BITS_TOKENS = {"eager": 24, "replayed": 24 + fused_steps.Progress.after}
#: Tokens of a turn, and after how many of them tokens are counted.
TOKENS = {"eager": (16, 2), "replayed": (120, 10)}
SLOW = {"eager": (6, 1), "replayed": (12, 4)}
WAYS: dict[str, Data] = {"eager": {"disable_compile": True}, "replayed": {}}
#: Tokens before the profile of a step begins.
SKIPPED = 6
#: What is kept free of a budget beside weights and the peak of a prefill that was measured.
RESERVE_GIB = 0.3
#: Tokens of a step of QLoRA, and the steps: the first ones are not timed.
TRAINED, STEPS, SETTLED, RANK = (512, 2048), 5, 2, 16
#: Forwards of a token after the files of experts were dropped.
COLD = 6


class Run:
    """The result so far, the time that is left, and what the cases are compared with."""

    def __init__(self, arguments: Any, options: list[str]) -> None:
        self.shape, self.out = arguments.shape, arguments.out
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, options, arguments.note)
        self.result |= {"machine": device.machine(), "host_to_device_gib_s": device.bandwidth(), "cases": {}}
        if arguments.add_to:
            earlier = json.loads(Path(arguments.add_to).read_text(encoding="utf-8"))
            if earlier["machine"] != self.result["machine"]:
                raise SystemExit(f"{arguments.add_to} is of another machine or stack: {earlier['machine']}")
            self.result = earlier | {"command": f"{earlier['command']}; {self.result['command']}", "not_run": []}
        self.hosted: models.Hosted = {}
        self.expected: dict[str, Any] = {}
        self.took: dict[str, float] = {}

    def part(self, name: str, do: Callable[[], Data], entry: Data, key: str) -> None:
        """Keep what ``do`` returns; an error is a problem, what there is no time for is not run."""
        kind = key if key != "bits" else name
        if self.deadline - time.monotonic() < self.took.get(kind, 5.0):
            self.result["not_run"].append(f"{name} {key}")
            return
        started = time.monotonic()
        try:
            entry[key] = do()
        except Exception as error:  # noqa: BLE001  # a problem of this part alone
            self.result["problems"].append(
                f"{name} {key}: {type(error).__name__}: {' '.join(str(error).split()):.300}"
            )
        self.took[kind] = time.monotonic() - started
        entry.setdefault("seconds", {})[key] = self.took[kind]
        common.write(self.result, self.out)
        print(f"{name:10} {key:8} {self.took[kind]:6.1f} s  {common.rounded(entry.get(key))}", flush=True)


# What is measured


def ids(model: Any, length: int, seed: int = 7) -> Any:
    import torch

    vocabulary = min(250_000, model.config.get_text_config().vocab_size - 16)
    found = torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(seed))
    return found.to(device.main_device())


def generate(model: Any, way: str, tokens: int, given: Any, **options: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            cache_implementation="static",
            **options,
            **WAYS[way],
        )


def answers(model: Any, tokens: dict[str, int]) -> dict[str, list[Any]]:
    """Logits, on the CPU; of as many ``tokens`` each way."""
    import torch

    found: dict[str, list[Any]] = {}
    with torch.no_grad():
        found["prompt"] = [model(input_ids=ids(model, PROMPT)).logits.cpu()]
        found["token"] = [model(input_ids=ids(model, 1, seed)).logits.cpu() for seed in (1, 2)]
        found["5 tokens"] = [model(input_ids=ids(model, 5)).logits.cpu()]
        found["image"] = [model(**image_prompt(model), logits_to_keep=8).logits.cpu()]
    for way in WAYS:
        kept = {"return_dict_in_generate": True, "output_logits": True}
        found[f"generate {way}"] = [
            one.cpu() for one in generate(model, way, tokens[way], ids(model, 24), **kept).logits
        ]
    return found


def bits(run: Run, model: Any, name: str) -> Data:
    import torch

    few = device.main_device() == "cpu" or name == "disk"
    said = answers(model, dict.fromkeys(WAYS, 8) if few else BITS_TOKENS)
    if name == "card":
        run.expected = said
        return {"expected": {key: len(value) for key, value in said.items()}} | {"finite": _finite(said)}
    found: Data = {"finite": _finite(said)}
    for key, value in said.items():
        pairs = list(zip(value, run.expected[key]))
        worst = max(float((one - other).abs().max()) for one, other in pairs)
        found[key] = worst if worst or all(torch.equal(*pair) for pair in pairs) else float("inf")
        if found[key] != 0.0:
            run.result["problems"].append(f"{name}: {key} differs by {found[key]}")
    return found


def _finite(said: dict[str, list[Any]]) -> bool:
    return all(bool(one.isfinite().all()) for values in said.values() for one in values)


def memory(model: Any, lengths: tuple[int, ...], away: int, *, chunk: int, whole: bool) -> Data:
    """What is loaded, and the peak and the seconds of a prefill, the second one of its length.

    Args:
        model: the model.
        lengths: tokens of the prompts.
        away: of how many layers the experts are in host memory, for the planner.
        chunk: tokens of a chunk; the seconds are those of a ``generate`` of one token, the step not included.
        whole: prompts at once are measured, too.
    """
    import torch

    found: Data = {"loaded_gib": device.memory()["resident_gib"]}

    def at_once(given: Any) -> None:
        with torch.no_grad():
            model(input_ids=given, use_cache=True, logits_to_keep=1)

    def in_chunks(given: Any) -> None:
        generate(model, "replayed", 1, given, prefill_chunk_size=chunk)

    ways = {"": at_once} if whole else {}
    for name, take in (ways | {f" in chunks of {chunk}": in_chunks}).items():
        for length in lengths:
            device.forget_peak()
            for _ in range(2):
                device.synchronize()
                started = time.perf_counter()
                take(ids(model, length))
                device.synchronize()
            entry = {"prefill_s": time.perf_counter() - started, **device.memory()}
            planned = planned_peak(model, away, length, chunk if name else None)
            found[f"{length}{name}"] = entry | {"planned_beside_weights_gib": planned}
    return found


def planned_peak(model: Any, away: int, length: int, chunk: int | None) -> float:
    """GiB that the planner counts for a prefill beside the weights that stay on the card."""
    import torch

    from gemma4_compat._gemma4.quantization import config
    from gemma4_compat._memory import blueprint as blueprints
    from gemma4_compat._memory import formulas, use

    with torch.device("meta"):
        plain = type(model)._from_config(model.config, dtype=torch.bfloat16)
    names = config.linear_names(plain, config.default_skip_modules(plain))
    blueprint = blueprints.describe(plain, "4bit-double", names, experts=True)
    chunked = chunk is not None
    load = formulas.Load(context=length + chunked, prompt=length, prefill_chunk=chunk, fast=chunked)
    looked_up = blueprint.layers[len(blueprint.layers) - away :]
    found = use.use_of(blueprint, use.Share(resident=blueprint.blocks, looked_up=looked_up), load, budget=1 << 62)
    return (found.prefill - found.weights) / GIB


def speed(run: Run, model: Any, name: str, *, slow: bool) -> Data:
    from gemma4_compat._graphs import decoder

    found: Data = {}
    bus = run.result["host_to_device_gib_s"]
    only_eager = name in ("disk", "upstream")
    for way, (tokens, settled) in (SLOW if slow else TOKENS).items():
        if only_eager and way != "eager":
            continue
        device.forget_peak()
        if way == "replayed":  # graphs are captured, and fused: the next call has them
            generate(model, way, tokens, ids(model, PROMPT))
        clock = Clock()
        generate(model, way, tokens, ids(model, PROMPT), streamer=clock)
        times = clock.times[1:]
        rate = (len(times) - 1 - settled) / (times[-1] - times[settled])
        found[way] = {"tok_s": rate, **device.memory()}
        if "bytes_a_token" not in found:  # groups say how they came last: for a token, after an eager step
            found["bytes_a_token"] = bytes_a_token(model)
        if bus is not None and sum(found["bytes_a_token"].values()):
            bound = bus["pinned"] * GIB / sum(found["bytes_a_token"].values())
            found[way] |= {"bus_bound_tok_s": bound, "share_of_bound": rate / bound}
    if only_eager:
        return found
    counted = decoder.statistics(model)
    if counted.fused and name in ("card", "experts", "budget:8"):
        tokens, settled = TOKENS["replayed"]
        with separate_kernels(model):
            generate(model, "replayed", tokens, ids(model, PROMPT))
            clock = Clock()
            generate(model, "replayed", tokens, ids(model, PROMPT), streamer=clock)
        times = clock.times[1:]
        found["separate_kernels"] = {"tok_s": (len(times) - 1 - settled) / (times[-1] - times[settled])}
    if device.main_device() != "cpu" and not counted.replayed:
        run.result["problems"].append(f"nothing was replayed: {', '.join(counted.reasons)}")
    if name in ("experts", "layers") or name.startswith("budget"):
        found["kept"] = kept(model)
    found["steps"] = {
        key: getattr(counted, key) for key in ("replayed", "captured", "fused", "capture_seconds", "reasons")
    }
    return found


def kept(model: Any) -> Data:
    """Tokens a second while the experts used last stay on the card, which needs that no streamer of ours runs."""
    from gemma4_compat._graphs import decoder

    tokens, settled = TOKENS["replayed"]
    for _ in range(2):  # graphs are captured, and fused
        generate(model, "replayed", tokens, ids(model, PROMPT))
    before, seconds = _counted_experts(decoder.statistics(model)), []
    for count in (settled, tokens):
        device.synchronize()
        started = time.perf_counter()
        generate(model, "replayed", count, ids(model, PROMPT))
        device.synchronize()
        seconds.append(time.perf_counter() - started)
    both = [now - then for now, then in zip(_counted_experts(decoder.statistics(model)), before, strict=True)]
    found = decoder.of(model).experts
    memory = {} if found is None else {"slots": found.number, "gib": found.nbytes / GIB}
    return {"tok_s": (tokens - settled) / (seconds[1] - seconds[0]), "hit_rate": both[0] / max(sum(both), 1)} | memory


def _counted_experts(counted: Any) -> tuple[int, int]:
    return counted.experts_kept, counted.experts_brought


def cold(model: Any) -> Data:
    """Forwards of a token while nothing of the experts' files is in memory, and while the token's experts are."""
    import torch

    from gemma4_compat._offload.transfer import streaming

    groups = [group for streamer in streaming.streamers(model) for group in streamer.groups() if group.on_disk]
    tensors = [weight.stored.raw for group in groups for weight in group._weights if weight.stored.on_disk]
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    resident = []
    with torch.no_grad():
        for seed in range(COLD):
            given = ids(model, 1, seed)
            resident.append(mapped_files.dropped(tensors))
            for kind in seconds:
                device.synchronize()
                started = time.perf_counter()
                model(input_ids=given)
                device.synchronize()
                seconds[kind].append(time.perf_counter() - started)
    mapped_files.dropped(tensors)
    return {
        "seconds": seconds,
        "resident_before": max(resident),
        "read_gib_s": mapped_files.read_gib_s(tensors),
        "tok_s": {kind: 1 / statistics.median(found) for kind, found in seconds.items()},
    }


def bytes_a_token(model: Any) -> dict[str, int]:
    """What a step of one token brings over the bus: of streamed layers, and of experts."""
    from gemma4_compat._offload.transfer import expert_lookup, streaming

    text = model.config.get_text_config()
    layers, hit = 0, 0
    for streamer in streaming.streamers(model):
        for group in streamer.groups():
            if not group.in_part:
                layers += group.size
                continue
            layers += group.size_without_experts
            own = [one for weight in group._weights if weight.module is group.experts for one in weight.sources()]
            nbytes = sum(one.size for one in own if expert_lookup.per_expert(one.tensor))
            hit += nbytes * text.top_k_experts // text.num_experts
    return {"layers": layers, "experts": hit}


def gathered(run: Run) -> Data | None:
    """GiB/s of a copy, and of the gather of 8 of 128 rows out of pinned host memory, by the width of what is read."""
    import torch

    from gemma4_compat._gemma4.quantization.expert_storage import rows_of
    from gemma4_compat._offload import host_memory

    if not torch.cuda.is_available():
        return None
    text = models.config(run.shape).get_text_config()
    found: Data = {}
    for name, width in (
        ("gate_up_proj", text.moe_intermediate_size * text.hidden_size),
        ("down_proj", text.moe_intermediate_size * text.hidden_size // 2),
        ("absmax", text.moe_intermediate_size * text.hidden_size // 32),
    ):
        rows = torch.randint(0, 255, (text.num_experts, width), dtype=torch.uint8)
        pinned = host_memory.pin(rows, torch.device("cuda", 0))
        view = None if pinned is None else pinned.view_on(torch.device("cuda", 0))
        if view is None:
            return {"not": "pinned"}
        chosen = [torch.randperm(text.num_experts)[: text.top_k_experts].sort().values.cuda() for _ in range(20)]
        takes = {"bytes": functools.partial(view.index_select, 0), "words": functools.partial(rows_of, view)}
        for kind, take in takes.items():
            seconds, _ = device.timed(lambda take=take, chosen=chosen: [take(one) for one in chosen], runs=3)
            found[f"{name} {kind}"] = len(chosen) * text.top_k_experts * width / seconds / GIB
    return found


def profiled(model: Any) -> Data:
    """Milliseconds a token of the kernels of replayed steps, those that take longest, and of all."""

    def decode(start: Callable[[], None]) -> None:
        # Before what is recorded: the prompt, an eager token and a captured one.
        tokens = SKIPPED + kernels.TOKENS - 1
        generate(model, "replayed", tokens, ids(model, PROMPT), streamer=Clock(at={SKIPPED: start}))

    generate(model, "replayed", TOKENS["replayed"][0], ids(model, PROMPT))  # until the graph is fused
    return kernels.recorded(decode)


def training(run: Run, model: Any, name: str, lengths: tuple[int, ...]) -> Data:
    """Steps of QLoRA with checkpointing and the loss in chunks; the first loss must be that of the card.

    LoRA of the same weights each time, on every linear layer of the decoder that is no expert.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._plan.training_step import TARGETS

    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS)
    trained_model = common.parts(get_peft_model(model, config).train(), loss=True)
    trained_model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained_model.enable_input_require_grads()
    weights = [weight for _, weight in sorted(trained_model.named_parameters()) if weight.requires_grad]
    kind = "cuda" if device.main_device() != "cpu" else "cpu"
    found: Data = {}
    for length in lengths:
        generator = torch.Generator().manual_seed(0)
        for weight in weights:
            weight.data = torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator).to(weight.device)
        optimizer = torch.optim.AdamW(weights, lr=1e-4)
        given = ids(model, length)
        seconds, losses = [], []
        for step in range(STEPS):
            if step == SETTLED:
                device.forget_peak()
            device.synchronize()
            started = time.perf_counter()
            with torch.autocast(kind, dtype=torch.bfloat16):
                loss = trained_model(input_ids=given, labels=given, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            device.synchronize()
            seconds.append(time.perf_counter() - started)
            losses.append(f"{loss.item():.9g}")
        median = statistics.median(seconds[SETTLED:])
        found[str(length)] = {
            **{"seconds": seconds[SETTLED:], "tokens_s": length / median, "losses": losses},
            **device.memory(),
        }
        expected = run.result["cases"]["card"].get("training", found)[str(length)]["losses"]
        if losses[0] != expected[0]:
            run.result["problems"].append(f"{name}: a loss of {losses[0]} with {length} tokens, {expected[0]} on card")
    return found


# The whole


@contextlib.contextmanager
def without_lookup() -> Iterator[None]:
    """Inside, whole layers are streamed for every token."""
    from gemma4_compat._offload.transfer.module_groups import ModuleGroup

    decide = ModuleGroup.looks_experts_up
    ModuleGroup.looks_experts_up = lambda _: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModuleGroup.looks_experts_up = decide  # type: ignore[method-assign]


@contextlib.contextmanager
def separate_kernels(model: Any) -> Iterator[None]:
    """Inside, fused steps gather, dequantize and copy experts by PyTorch's and bitsandbytes' kernels."""
    from gemma4_compat._graphs import decoder
    from gemma4_compat._kernels.specs import expert_rows

    decoder.of(model).clear()
    kept = expert_rows.Rows.dequantized, expert_rows.Rows.positions
    expert_rows.Rows.dequantized = expert_rows.Rows.positions = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        expert_rows.Rows.dequantized, expert_rows.Rows.positions = kept  # type: ignore[method-assign]
        decoder.of(model).clear()


def layers_that_fit(run: Run, budget: float) -> int:
    """Of how many layers the experts fit on the card beside what the case "experts" needs at most."""
    measured = run.result["cases"]["experts"]["memory"]
    needed = max(value["peak_reserved_gib"] for name, value in measured.items() if "chunks" in name)
    one = next(iter(run.hosted.values()))
    nbytes = sum(_stored(parameter) for parameter in one.values()) / GIB
    return max(0, min(len(run.hosted), int((budget - needed - RESERVE_GIB) / nbytes)))


def _stored(parameter: Any) -> int:
    from gemma4_compat._gemma4.quantization.bytes import stored_bytes

    return int(stored_bytes(parameter))


def case(run: Run, name: str, parts: list[str]) -> None:
    import gemma4_compat

    entry: Data = run.result["cases"].setdefault(name, {})
    where = {"whole": "layers"}.get(name, name)
    away = 0 if name in ("card", "upstream") else len(run.hosted)
    if name.startswith("budget:"):
        if "memory" not in run.result["cases"].get("experts", {}) or device.main_device() == "cpu":
            run.result["not_run"].append(name)
            return
        entry["layers_with_experts_on_card"] = layers_that_fit(run, float(name.partition(":")[2]))
        where = f"experts:{entry['layers_with_experts_on_card']}"
        away -= entry["layers_with_experts_on_card"]
    made: list[Any] = []

    def build() -> Data:
        made.append(models.placed(run.shape, run.hosted, where))
        if device.main_device() != "cpu" and name not in ("upstream", "disk"):
            gemma4_compat.decode_fast(made[0])
        return device.memory()

    with without_lookup() if name == "whole" else contextlib.nullcontext():
        run.part(name, build, entry, "build")
        if made:
            small = device.main_device() == "cpu"
            lengths = (64,) if small else PREFILLS
            chunk = 16 if small else SMALL_CHUNK if name == "budget:6" else CHUNK
            steps: dict[str, Callable[[], Data]] = {
                "bits": lambda: bits(run, made[0], name),
                "memory": lambda: memory(made[0], lengths, away, chunk=chunk, whole=not name.startswith("budget")),
                "speed": lambda: speed(run, made[0], name, slow=small or name in ("whole", "disk")),
                "profile": lambda: profiled(made[0]),
                "training": lambda: training(run, made[0], name, (16,) if small else TRAINED),
                "cold": lambda: cold(made[0]),
            }
            few = {"whole": ("speed",), "disk": ("bits", "speed", "cold"), "upstream": ("speed", "memory")}
            for part in few.get(name, PARTS[:-1]):
                closely = part in ("profile", "training")
                known = part in entry and (name, part) != ("card", "bits")  # what others are compared with
                if part in parts and not known and (not closely or name in ("card", "experts", "layers")):
                    run.part(name, steps[part], entry, part)
    made.clear()
    gc.collect()
    device.forget_peak()


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=5.0)
    parser.add_argument("--cases", default="card,experts,layers,whole,budget:8", help=", ".join(CASES))
    parser.add_argument("--add-to", metavar="FILE", help="an earlier result")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    arguments = parser.parse_args(argv)
    if arguments.shape is None:
        parser.error("--shape is required")
    cases, parts = arguments.cases.split(","), arguments.parts.split(",")
    for wanted, known in ((cases, CASES), (parts, PARTS)):
        if unknown := [name for name in wanted if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if "upstream" in cases and (cases != ["upstream"] or gemma4_compat_is_on()):
        parser.error("upstream: alone, with GEMMA4_COMPAT_DISABLE=all in the environment")
    run = Run(arguments, common.shown(arguments))
    if cases == ["upstream"]:
        case(run, "upstream", parts)
        return finished(run)
    started = time.monotonic()
    run.hosted = models.hosted_experts(run.shape)
    nbytes = sum(_stored(parameter) for one in run.hosted.values() for parameter in one.values())
    run.result["experts"] = {"gib": nbytes / GIB, "build_s": time.monotonic() - started, "layers": len(run.hosted)}
    print(common.rounded(run.result["experts"]), flush=True)
    run.part("machine", lambda: gathered(run) or {}, run.result, "gathered_gib_s")
    for name in cases:
        case(run, name, parts)
    return finished(run)


def gemma4_compat_is_on() -> bool:
    import gemma4_compat

    return any(one.state == "applied" for one in gemma4_compat.status().values())


def finished(run: Run) -> int:
    common.write(run.result, run.out)
    for problem in run.result["problems"]:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if run.result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
