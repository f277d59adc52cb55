"""Sections of docs on the search, upstream's tests, the import and the merge, from the committed runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.decoding.models import WHERE
from tools.pages.markers import ROOT


def search_section() -> str:
    """What the committed runs of the randomized searches say."""
    rows = ["| stack | main device | tried | failing | command |", "|---|---|---|---|---|"]
    tried = {
        "placements": "placements",
        "sequences": "sequences of operations",
        "one device": "sequences of operations, nothing split, with the shim and without",
    }
    for name, run in _runs():
        if run.get("search") == "replays" or name.startswith("differential"):
            continue  # a section and a page of their own
        rows.append(
            f"| {_stack(name, run)} | {run['main device']} | {run['cases']} "
            f"{tried[run.get('search', 'placements')]}{_package(run)} | {len(run['failing'])} | `{run['command']}` |"
        )
    return "\n".join(rows)


def replays_section() -> str:
    """What the committed runs of the search for what a replay does not notice say."""
    rows = [
        "| stack | sequences | calls of `generate` | replayed steps | failing | command |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in _runs():
        if run.get("search") == "replays":
            rows.append(
                f"| {_stack(name, run)} | {run['cases']}{_package(run)} | {run['compared']}, {run['raised']} of them "
                f"raise both ways | {run['steps']} | {len(run['failing'])} | `{run['command']}` |"
            )
    return "\n".join(rows)


def _runs() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted((ROOT / "docs" / "evidence" / "search").glob("*.json")):
        yield file.name, json.loads(file.read_text(encoding="utf-8"))


def _stack(name: str, run: dict[str, Any]) -> str:
    libraries = ("transformers", "accelerate", "peft", "bitsandbytes")
    versions = ", ".join(f"{library} {run['versions'][library]}" for library in libraries)
    return f"{versions} ([raw](docs/evidence/search/{name}), {run['date']})"


def _package(run: dict[str, Any]) -> str:
    """Which code was searched, where it was not that of the commit that has the result."""
    return f", the package at {run['package']}" if "package" in run else ""


def upstream_section() -> str:
    """Upstream's own tests, with the shim off and on."""
    rows = [
        "| stack | upstream tests executed | same outcome off and on | accelerate | peft | differences |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("newest", "thread"):
        run = json.loads((ROOT / "docs" / "evidence" / "upstream" / f"{name}.json").read_text(encoding="utf-8"))
        suites = run["suites"]
        different = [test for suite in suites.values() for test in suite["different"]]
        rows.append(
            f"| [{name}](docs/evidence/upstream/{name}.json), {run['date']} | {run['executed']} | {run['identical']} "
            + "".join(
                f"| {suites[suite]['version']}: {suites[suite]['executed']} " for suite in ("accelerate", "peft")
            )
            + f"| {', '.join(different) or 'none'} |"
        )
    return "\n".join(rows)


def import_section() -> str:
    files = sorted((ROOT / "benchmarks" / "results").glob("*-import_time.json"))
    run = json.loads(files[-1].read_text(encoding="utf-8"))
    return (
        f"`import gemma4_compat` takes {run['median_ms']['gemma4_compat']:.0f} ms of one CPU core, {run['ratio']:.2f} "
        "times as much as `import importlib.metadata, packaging.specifiers`, which it needs (median of "
        f"{run['runs']} processes, Python {run['python']}, {run['date']}; `python benchmarks/shim/import_time.py`)."
    )


def commands_section() -> str:
    """The run of benchmarks/shim/commands.py."""
    file = ROOT / "benchmarks/results/2026-11-30-cpu/commands.json"
    run = json.loads(file.read_text(encoding="utf-8"))
    shown = [row for row in run["commands"] if row["where"] == "terminal"]
    rows = [
        "| command | first byte | longest silence | in all | CPU | lines |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| `{row['arguments']}` | {_seconds(row['first_byte_s'])} | {_seconds(row['longest_silence_s'])} "
            f"| {_seconds(row['wall_s'])} | {_seconds(row['cpu_s'])} | {row['lines']} |"
            for row in shown
            if not row["name"].startswith("wrong")
        ),
    ]
    wrong = [row for row in shown if row["name"].startswith("wrong")]
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("transformers", "peft", "torch"))
    return "\n".join(
        [
            *rows,
            "",
            f"{len(wrong)} wrong values, names and folders are refused before torch is imported, after at most "
            f"{max(row['cpu_s'] for row in wrong):.1f} s of CPU (load up to {max(run['load'])} on {run['cores']} "
            f"cores, no GPU, {versions}, {run['date']}; `python benchmarks/shim/commands.py --where terminal`; "
            f"[raw]({file.relative_to(ROOT).as_posix()})).",
        ]
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def merge_section() -> str:
    """The committed run of benchmarks/adapters/merge.py."""
    file = sorted((ROOT / "benchmarks" / "results" / "merge").glob("*.json"))[-1]
    run = json.loads(file.read_text(encoding="utf-8"))
    mib = 2**20
    rows = ["| way | peak memory | of largest shard + layer | of the checkpoint | time |", "|---|---|---|---|---|"]
    for name, way in run["ways"].items():
        rows.append(
            f"| `{name}` | {way['peak'] / mib:.0f} MiB | {way['of_shard_and_layer']:.2f} | {way['of_checkpoint']:.2f} "
            f"| {way['seconds']:.1f} s |"
        )
    same = run["values"] - run["values_that_differ"]
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("transformers", "peft", "torch"))
    return "\n".join(
        [
            *rows,
            "",
            f"Memory of the merge itself, beyond the imports, for a checkpoint of {run['checkpoint'] / mib:.0f} MiB "
            f"(largest shard {run['largest_shard'] / mib:.0f}, one layer {run['largest_layer'] / mib:.0f}, adapter "
            f"{run['adapter'] / mib:.0f}), without the check; {same:,} of {run['values']:,} values are the same both "
            f"ways (`python benchmarks/adapters/merge.py`; {versions}, CPU, {run['date']}; "
            f"[raw]({file.relative_to(ROOT).as_posix()})).",
        ]
    )


#: The ways of benchmarks/adapters/checkpoints.py and what they are called on a page.
WRITERS = {
    "copy": "a copy of the files",
    "repair": "`repair`",
    "merge": "`merge`",
    "dequantized": "`merge --start dequantized`",
    "quantized": "`merge --quantize-result 4bit-double`",
    "export": "`export`",
}


def checkpoints_section() -> str:
    """The newest committed run of benchmarks/adapters/checkpoints.py."""
    file = sorted((ROOT / "benchmarks" / "results").glob("*-cpu/checkpoints-*.json"))[-1]
    run = json.loads(file.read_text(encoding="utf-8"))
    rows = ["| what | time | of a copy's | peak memory | written |", "|---|---:|---:|---:|---:|"]
    for way, found in run["ways"].items():
        low, high = min(found["seconds"]), max(found["seconds"])
        spread = f" ({low:.1f} to {high:.1f})" if len(found["seconds"]) > 1 else ""
        rows.append(
            f"| {WRITERS[way]} | {found['median_seconds']:.1f} s{spread} | {found['of_copy']:.2f} "
            f"| {found['peak'] / 2**20:.0f} MiB | {found['written'] / 1e9:.2f} GB |"
        )
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("transformers", "peft", "torch"))
    return "\n".join(
        [
            *rows,
            "",
            f"{run['shape']}, random weights, {run['checkpoint'] / 1e9:.1f} GB in {run['shards']} files, a LoRA of "
            f"{run['adapter'] / 1e6:.0f} MB; medians, in turns; memory beyond the imports, merges without the check "
            f"({run['machine']}, {versions}, {run['date']}; `python benchmarks/adapters/checkpoints.py`; "
            f"[raw]({file.relative_to(ROOT).as_posix()})).",
        ]
    )


def mlp_pieces_section() -> str:
    """Peaks and speeds of steps with whole MLPs and with MLPs in chunks."""
    rows = []
    for shape in ("E2B", "E4B"):
        file = ROOT / "benchmarks" / "results" / "2026-11-27-h100" / f"mlp_pieces-{shape}.json"
        cells = json.loads(file.read_text(encoding="utf-8"))["steps"]["streamed"]["cells"]
        whole, pieces = cells["16384 chunked"], cells["16384 pieces"]
        peaks = (f"{cell['memory']['peak_gib']:.2f}" for cell in (whole, pieces))
        speeds = [cell["sequence"] / statistics.median(cell["seconds"]) for cell in (whole, pieces)]
        rows.append(f"| {shape} | {whole['sequence']:,} | {' | '.join(peaks)} | {speeds[0]:,.0f} | {speeds[1]:,.0f} |")
    heads = "| model | tokens | whole, GiB | in chunks, GiB | whole, tokens a second | in chunks, tokens a second |"
    return "\n".join((heads, "|---|---:|---:|---:|---:|---:|", *rows))


#: What each way of benchmarks/training/long_steps.py adds to the one before.
LONG_STEPS = {
    "chunked": "loss in chunks",
    "mlp": "and MLPs in chunks",
    "pieces": "and the rest of `mlp=True`",
    "offload": "and checkpoints in host memory",
    "windows": "`mlp=True` and sliding windows",
    "all": "`mlp=True`, sliding windows, and checkpoints in host memory",
}
#: What is allocated before a step may be so many times the loaded model: adapter and optimizer.
_HELD = 1.5


def long_steps_section() -> str:
    """Which long steps fit, how fast they are, and which bits a switch changes: the newest run of each shape."""
    files = {file.stem: file for file in sorted((ROOT / "benchmarks" / "results").glob("*/long_steps-*.json"))}
    if not files:
        return "No GPU has run `python benchmarks/training/long_steps.py` yet."
    runs = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files.values()]
    rows = [
        "| model | tokens | switches | peak, GiB | planned | tokens a second | fits |",
        "|---|---:|---|---:|---:|---:|---|",
    ]
    for _, run in runs:
        cells = sorted(
            run["cells"].items(), key=lambda one: (one[1]["sequence"], list(LONG_STEPS).index(one[1]["way"]))
        )
        for title, cell in cells:
            if (cell["memory"]["resident_gib"] or 0) > _HELD * (run["loaded"]["resident_gib"] or 0):
                continue  # a step that failed before holds memory
            peak, planned = cell["memory"]["peak_gib"], cell.get("planned_gib")
            shown = ["-" if value is None else f"{value:.2f}" for value in (peak, planned)]
            fits = [f"{budget} GiB" for budget, found in run["fits"].get(title, {}).items() if found["fits"]]
            rows.append(
                f"| {run['shape']} | {cell['sequence']:,} | {LONG_STEPS[cell['way']]} | {' | '.join(shown)} "
                f"| {cell['tokens_per_second']:,.0f} | {', '.join(fits) or '-'} |"
            )
    if any(run["bits"] for _, run in runs):
        said = (
            "What each switch changes in the first step, against the way before it. PyTorch's attention adds gradients"
        )
        rows += ["", f"{said} up in another order each time, so compare with the same step run again:", ""]
    for _, run in runs:
        for name, found in run["bits"].items():
            what = "the same step again" if name == "again" else LONG_STEPS[name].removeprefix("and ")
            same = "with the same bits" if found["loss_equal"] else "rounded differently"
            equal = f"{found['gradients_equal']} of {found['gradients']} have the same bits"
            apart = f"; together they differ by {found['apart']:.2g} of their norm." if found["apart"] else "."
            rows.append(f"- {run['shape']}, {what}: a loss {same}; of gradients, {equal}{apart}")
    places = WHERE | {"experts": "experts in host memory"}
    sources = "; ".join(
        f"[{run['shape']}](../{file.relative_to(ROOT).as_posix()}), {run['machine']['device']}, {places[run['where']]}"
        for file, run in runs
    )
    return "\n".join([*rows, "", f"Raw: {sources}."])


def short_steps_section() -> str:
    """What `train_fast` gives for short sequences: the newest run of each shape."""
    files = {file.stem: file for file in sorted((ROOT / "benchmarks" / "results").glob("*/short_steps-*.json"))}
    runs = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files.values()]
    if not runs:
        return "No GPU has run `python benchmarks/training/short_steps.py` yet."
    rows = [
        "| model | tokens | with | tokens a second | `train_fast` | times as fast "
        "| reserved, GiB | with `train_fast` |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    said, found = [], []
    for _, run in runs:
        for sequence in {cell["sequence"] for cell in run["cells"].values()}:
            cells = [cell for cell in run["cells"].values() if cell["sequence"] == sequence]
            for number, (switches, names) in enumerate(_STEPS.items()):
                ways = [[cell for cell in cells if cell["way"] == name] for name in names]
                if all(ways):
                    found.append((run["shape"], sequence, number, f"{switches} | {_two_ways(*ways)}"))
        if run["bits"]:
            again, fast = run["bits"]["again"], run["bits"]["fast"]
            said.append(
                f"{run['shape']}: the first loss has the same bits; gradients of two runs of the same step differ by "
                f"{again['apart']:.2g} of their norm, and those of `train_fast` by {fast['apart']:.2g}, for PyTorch's "
                "attention adds gradients up in another order each time."
            )
    rows += [f"| {shape} | {sequence:,} | {text} |" for shape, sequence, _, text in sorted(found)]
    sources = "; ".join(
        f"[{run['shape']}](../{file.relative_to(ROOT).as_posix()}), {run['machine']['device']}" for file, run in runs
    )
    return "\n".join([*rows, "", " ".join([*said, f"Up to two turns of each way. Raw: {sources}."])])


#: The ways of benchmarks/training/short_steps.py that differ in `train_fast` only, by what else they have.
_STEPS = {
    "-": ("plain", "fast"),
    "sliding windows": ("windows", "fast-windows"),
    "sliding windows, `mlp=True`": ("pieces", "fast-pieces"),
}


def _two_ways(plain: list[Any], fast: list[Any]) -> str:
    """Their speeds, how many times as fast the second is, and what they reserve."""
    speeds = [[_speed(cell) for cell in cells] for cells in (plain, fast)]
    times = sorted(second / first for first, second in zip(*speeds))
    faster = " to ".join(dict.fromkeys(f"{time:.1f}" for time in (times[0], times[-1])))
    reserved = [f"{max(cell['memory']['peak_reserved_gib'] for cell in cells):.2f}" for cells in (plain, fast)]
    return " | ".join(["/".join(f"{speed:,.0f}" for speed in each) for each in speeds] + [faster, *reserved])


def _speed(cell: dict[str, Any]) -> float:
    """Tokens a second of a turn."""
    return float(cell["sequence"] / statistics.median(cell["seconds"]))


def grpo_steps_section() -> str:
    """What a whole step of GRPO takes, upstream and replayed: the newest run of each name."""
    files = {file.stem: file for file in sorted((ROOT / "benchmarks" / "results").glob("*/grpo_steps-*.json"))}
    runs = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files.values()]
    runs = [(file, run) for file, run in runs if run["summary"]]
    if not runs:
        return "No GPU has run `python benchmarks/training/grpo_steps.py` yet."
    rows = [
        "| model, adapter | way | rollout, s | training step, s | share of rollout | both, s | times as fast "
        "| peak in rollout, GiB | in training | reserved | fits |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    said = []
    for _, run in runs:
        fast = run["summary"]["times_as_fast"]["whole"]
        name = f"{run['shape']}, {run['adapter']}"
        for way, one in run["summary"]["ways"].items():
            low, high = fast["quartiles"]
            spread = f" ({low:.1f} to {high:.1f})" if fast["of"] > 1 else ""
            times = f"**{fast['median']:.1f}**{spread}" if way == "replayed" else "1"
            peaks = [one[key] for key in ("rollout_peak_gib", "training_peak_gib", "peak_reserved_gib")]
            fits = [f"{budget} GiB" for budget, found in run["fits"].get(way, {}).items() if found["fits"]]
            cells = [f"{one['rollout_s']:.2f}", f"{one['training_s']:.2f}", f"{one['rollout_share']:.0%}"]
            cells += [f"{one['whole_s']:.2f}", times, *("-" if peak is None else f"{peak:.2f}" for peak in peaks)]
            rows.append(f"| {name} | {_grpo_way(way, run)} | {' | '.join(cells)} | {', '.join(fits) or '-'} |")
        for way, found in run["log_probabilities"].items():
            said.append(
                f"- {name}, {_grpo_way(way, run)}: log-probabilities of a rollout and of the training step's forward "
                f"differ by {found['mean']:.2g} on average, at most {found['largest']:.2g}, in {found['tokens']:,} "
                "tokens."
            )
    sources = "; ".join(
        f"[{run['shape']}](../{file.relative_to(ROOT).as_posix()}), {run['machine']['device']}, "
        f"{WHERE[run['where']]}, {run['rows']} completions of {run['tokens']} tokens, rounds: {len(run['rounds'])}"
        for file, run in runs
    )
    return "\n".join([*rows, "", *said, "", f"Raw: {sources}."])


def _grpo_way(way: str, run: dict[str, Any]) -> str:
    if way == "upstream":
        return way if run["whole_shim_off"] else "without `decode_fast`"
    return "replayed, `exact=True`" if run["exact"] else way


def chunked_loss_section() -> str:
    """What the loss in chunks saves, and how far it is from the plain one."""
    (file,) = sorted((ROOT / "benchmarks" / "results").glob("*-cpu/chunked_loss.json"))[-1:]
    run = json.loads(file.read_text(encoding="utf-8"))
    memory, peak = run["memory"], run["memory"]["peak_gib"]
    rows = [
        f"Measured on a CPU ([raw](../{file.relative_to(ROOT).as_posix()}), transformers {run['transformers']}, torch "
        f"{run['torch']}; `python benchmarks/training/chunked_loss.py`): a forward and backward pass of "
        f"{memory['tokens']:,} tokens over {memory['vocabulary']:,} words in bfloat16, of a model so small that the "
        f"loss is nearly all of it, takes {peak['plain']:.2f} GiB at its peak, and {peak['chunked']:.2f} GiB in "
        f"chunks: {memory['ratio']:.1f} times less (medians of {len(memory['rounds_gib']['plain'])} processes each, "
        "in turns).",
        "",
        "The difference between the two, for tiny models with random weights and chunks of 5 tokens: relative for the "
        "loss; for the gradients, the norm of all differences relative to the norm of all gradients. For bfloat16 "
        "the last columns show the distance of each from float32: the dtype causes the rounding, not the chunks.",
        "",
        "| class | float32: loss | gradients | bfloat16: loss | gradients | plain from float32 "
        "| chunks from float32 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in run["exactness"].items():
        single, half = found["float32"], found["bfloat16"]
        figures = [single["loss"], single["gradients"], half["loss"], half["gradients"]]
        figures += [half["plain_from_float32"], half["chunked_from_float32"]]
        rows.append(f"| `{name}` | " + " | ".join(f"{figure:.1e}" if figure else "0" for figure in figures) + " |")
    return "\n".join(rows)
