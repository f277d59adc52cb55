"""The README's sections on the search, upstream's tests, the import and the merge, from the committed runs."""

from __future__ import annotations

import json
from typing import Any

from tools.pages.markers import ROOT


def search_section() -> str:
    """What the committed runs of the randomized searches say."""
    rows = ["| stack | main device | tried | failing | command |", "|---|---|---|---|---|"]
    tried = {
        "placements": "placements",
        "sequences": "sequences of operations",
        "one device": "sequences of operations, nothing split, with the shim and without",
    }
    for file in sorted((ROOT / "docs" / "search").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        stack = ", ".join(
            f"{key} {run['versions'][key]}" for key in ("transformers", "accelerate", "peft", "bitsandbytes")
        )
        rows.append(
            f"| {stack} ([raw](docs/search/{file.name}), {run['date']}) | {run['main device']} | {run['cases']} "
            f"{tried[run.get('search', 'placements')]}{_package(run)} | {len(run['failing'])} | `{run['command']}` |"
        )
    return "\n".join(rows)


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
        run = json.loads((ROOT / "docs" / "upstream" / f"{name}.json").read_text(encoding="utf-8"))
        suites = run["suites"]
        different = [test for suite in suites.values() for test in suite["different"]]
        rows.append(
            f"| [{name}](docs/upstream/{name}.json), {run['date']} | {run['executed']} | {run['identical']} "
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
        f"`import gemma4_compat` takes {run['ratio']:.2f} times as long as `import wrapt, packaging.specifiers`, "
        f"which it needs ({run['median_ms']['gemma4_compat']:.0f} ms, median of {run['runs']} processes, "
        f"Python {run['python']}, {run['date']}; `python benchmarks/import_time.py`)."
    )


def merge_section() -> str:
    """The committed run of benchmarks/merge.py."""
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
            f"ways (`python benchmarks/merge.py`; {versions}, CPU, {run['date']}; "
            f"[raw]({file.relative_to(ROOT).as_posix()})).",
        ]
    )
