"""The committed runs on GPUs: docs/GPU.md and the section of docs/EVIDENCE.md."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import gemma4_compat
from gemma4_compat import Patch
from tools import evidence
from tools.pages.markers import generated, shorten

#: The newest stack first: pages show it, and of the others what differs.
RESULTS = ("newest", "thread", "transformers-5.23.0")
NOT_MEASURED = "not measured"


@functools.cache
def _run(name: str) -> dict[str, Any]:
    return evidence.gpu(name)


def runs() -> Iterator[tuple[dict[str, Any], str]]:
    """The committed GPU runs, each with the line that says what ran where."""
    for name in RESULTS:
        run = _run(name)
        versions = run["versions"]
        stack = ", ".join(f"{key} {versions[key]}" for key in ("transformers", "accelerate", "peft", "bitsandbytes"))
        yield (
            run,
            f"**{stack}** ({run['device']}, driver {run['driver']}, torch {versions['torch']}, "
            f"Python {run['python']}; [raw](PAGEevidence/gpu/{name}.json))",
        )


def counts() -> list[str]:
    """How many patches were measured with each stack, for docs/EVIDENCE.md."""
    patches, lines = gemma4_compat.patches(), []
    for run, _ in runs():
        said = [verdict(run["measured"][patch.id]) for patch in patches if patch.id in run["measured"]]
        found = ", ".join(f"{said.count(name)} {name}" for name in ("repaired", "not affected", "not repaired"))
        release = run["versions"]["transformers"]
        lines.append(
            f"- On a [GPU](docs/GPU.md), transformers {release}: {len(said)} of {len(patches)} measured, {found}"
        )
    return lines


def verdict(seen: Mapping[str, Any]) -> str:
    """What was seen of one patch with one stack."""
    if seen["with"]["defect"]:
        return "not repaired"
    return "repaired" if seen["without"]["defect"] else "not affected"


def line(patch: Patch) -> str:
    """What was seen of a patch on a GPU: each verdict, and with which transformers."""
    said: dict[str, list[str]] = {}
    for run, _ in runs():
        if patch.id in run["measured"]:
            said.setdefault(verdict(run["measured"][patch.id]), []).append(run["versions"]["transformers"])
    return "; ".join(f"{name}: {', '.join(releases)}" for name, releases in said.items()) or NOT_MEASURED


def summary() -> str:
    """What the newest GPU run says of VRAM before and after the adapter."""
    run, title = next(runs())
    rows = []
    for scenario, what in (
        ("e2b split_towers", "E2B shape, towers on the CPU, adapter on everything"),
        ("e2b split_towers_pressure", "the same with 3 GiB free on the card"),
        ("tiny max_memory", '`device_map="auto"` with `max_memory` below the model, adapter on everything'),
    ):
        found = run["measured"][scenario]
        rows.append(f"| {what} | {case_text(found['without'])} | {case_text(found['with'])} |")
    return "\n".join([title.replace("PAGE", "docs/"), "", "| what | without | with |", "|---|---|---|", *rows])


def page() -> str:
    """docs/GPU.md: the newest stack, and what differs from it in the others."""
    parts = [
        "# On a GPU",
        "",
        generated("docs/evidence/gpu"),
        "",
        "The original error in a process without the shim, and the repair: three forwards and a `generate` are",
        "compared with the model entirely on the GPU. Repeat it with `gpu/run.sh WHEELS`.",
        "[The entry of each patch](PATCHES.md) says whether it repaired its defect there; its",
        "[raw data](evidence/patches) says what was seen.",
        "",
    ]
    newest = next(runs())[0]
    for run, title in runs():
        parts += [
            f"## transformers {run['versions']['transformers']}",
            "",
            title.replace("PAGE", ""),
            "",
            run["notes"],
        ]
        parts += ["", *(part_text(name, part) for name, part in run.get("parts", {}).items())]
        for prefix, heading in TABLES.items():
            rows, known = rows_of(run, prefix), {} if run is newest else rows_of(newest, prefix)
            other = [row for name, row in rows.items() if known.get(name) != row]
            if rows:
                same = f" {len(rows) - len(other)} of {len(rows)} rows are as in the newest stack." if known else ""
                parts += ["", heading + same]
            if other:
                parts += ["", "| what | without | with |", "|---|---|---|", *other]
        parts += ["", *tuners_lines(run)]
    return "\n".join(parts).rstrip() + "\n"


#: What the names of measurements begin with, and what stands above their table.
TABLES = {
    "thread: ": "The forum thread's matrix in E2B's shape, random weights; a ballast leaves the named memory free:",
    "e2b ": "E2B's shape with little on the card; the 26B-A4B's, cut to six layers; `max_memory` below a tiny model:",
    "two gpus: ": "Tiny models over two GPUs and the host; two training processes, and their difference from one:",
}


def rows_of(run: dict[str, Any], prefix: str) -> dict[str, str]:
    """The measurements whose names begin so: name -> row, those of other shapes with E2B's."""
    also = ("26B-A4B, 6 layers", "tiny max_memory") if prefix == "e2b " else ()
    rows = {}
    for name, found in run["measured"].items():
        if name.startswith(prefix) or name in also:
            sides = [found.get(side) for side in ("without", "with")]
            if any(sides):
                rows[name] = f"| {name.removeprefix(prefix)} | {' | '.join(map(case_text, sides))} |"
    return rows


def tuners_lines(run: dict[str, Any]) -> list[str]:
    """What tests/world/gpu/test_tuners.py found: how many cases were as on one GPU, and the others."""
    measured = run["measured"].items()
    errors = {name.removeprefix("tuners: "): found["error"] for name, found in measured if name.startswith("tuners: ")}
    if not errors:
        return []
    failed = [f"{name}: {shorten(error)}" for name, error in errors.items() if error is not None]
    host = sum(name.startswith("host, ") for name, error in errors.items() if error is None)
    return [
        "PEFT's tuners on tiny models, created, trained, saved, loaded and merged, with the bits of one GPU: "
        f"{host} cases over a GPU and the host, {len(errors) - len(failed) - host} over two GPUs; "
        f"not: {'; '.join(failed) or 'none'}.",
        "",
    ]


def part_text(name: str, part: dict[str, Any]) -> str:
    """How a part of `gpu/run.sh` went."""
    failed = "".join(f"; failed: `{test.partition(' - ')[0]}`" for test in part["failed"])
    machine = "one GPU" if part["gpus"] == 1 else f"{part['gpus']} GPUs"
    return f"- `{name}`, {part['seconds']} s on a machine with {machine}: {' '.join(part['said'])}{failed}"


def case_text(seen: Any) -> str:
    """What one side of a GPU scenario gave, in a line."""
    if seen is None:
        return "not run"
    if isinstance(seen, list):  # the processes of a training
        return next((text for text in map(case_text, seen) if "differ" not in text), case_text(seen[0]))
    if seen["error"] is not None:
        return shorten(seen["error"])
    said = ["all of it is put on the CPU"] if "all_on_the_host" in seen else []
    if "from" in seen:
        # There are several right ways to sum up on one GPU; the nearest counts.
        for what in ("losses", "gradients"):
            said.append(f"{what} differ by {min(max(way[what][:1]) for way in seen['from'].values()):.2g}")
    if "images_differ_by" in seen:
        said.append(
            f"two images differ by {seen['images_differ_by']:.3f} (in bf16 {seen['images_differ_by_in_bf16']:.3f}), "
            f"{seen['gib']:.2f} GiB (towers in bf16: {seen['towers_in_bf16_gib']:.2f})"
        )
    elif "experts_gib" in seen:
        said.append(f"{seen['gib']:.2f} GiB, experts {seen['experts_gib']:.2f}, routers {', '.join(seen['routers'])}")
    elif "gib" in seen:
        said.append(f"{seen['gib']:.2f} GiB")
    if "base_gib" in seen:
        said.append(f"{seen['base_gib']:.2f} -> {seen['adapter_gib']:.2f} GiB")
        said.append("towers back on the GPU" if seen["towers_on"] == ["cuda"] else "towers stay")
    elif "load_peak_gib" in seen:
        said.append(f"{seen['resident_gib']:.2f} GiB, at most {seen['load_peak_gib']:.2f} while loading")
    elif "peak_gib" in seen:
        said.append(f"at most {seen['peak_gib']:.2f} GiB")
    if "offloaded" in seen:
        said.append(f"{len(seen['offloaded'])} module{'s' * (len(seen['offloaded']) != 1)} on the CPU")
    if "distance" in seen:
        said.append(
            f"logits {seen['distance']:.2f} off the adapter's, whose effect is {seen['effect']:.2f}; "
            f"{seen['warnings']} warning{'s' * (seen['warnings'] != 1)}"
        )
    for key, what in (("parity", "logits differ by"), ("against_unpatched", "logits differ from upstream's by")):
        if seen.get(key) is not None:
            said.append("bit-exact" if seen[key] == 0.0 and key == "parity" else f"{what} {seen[key]:.3g}")
    return ", ".join(said)
