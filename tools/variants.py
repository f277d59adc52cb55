"""Reproduce every patch's defect on each variant of Gemma 4, made small, and write what was found to docs/evidence.

python tools/variants.py NAME                         every patch on every variant, in this environment
python tools/variants.py NAME --variants 12B          on some variants, beside what is known of the others
python tools/variants.py NAME --patches PATCH         one patch, beside what is known of the others

NAME is the stack's. Each reproduction runs with the shim off and on, in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gemma4_compat  # noqa: E402
from gemma4_compat import Gemma4CompatError  # noqa: E402
from gemma4_compat._doctor.reproductions import findings  # noqa: E402
from gemma4_compat._gemma4.models import variants  # noqa: E402
from gemma4_compat.patches import registry  # noqa: E402
from tools import evidence  # noqa: E402
from tools.pages.markers import generated  # noqa: E402

REPAIRED = "repaired"
NOT_AFFECTED = "not affected"
NOT_APPLICABLE = "not applicable"
UNREPAIRED = "NOT REPAIRED"
BROKEN = "BROKEN BY THE PATCH"
UNKNOWN = "NOT MEASURED"
#: Kept of a reproduction's result.
SHOWN = ("defect", "detail", "parity", "applicable")


def measure(variant: str, patches: Sequence[gemma4_compat.Patch], folder: Path) -> dict[str, Any]:
    """Verdict and results of each patch on one variant; ``{"missing": why}`` where this stack has no such variant."""
    from gemma4_compat._doctor.reproductions.children import Forks
    from gemma4_compat._lab.workspace import Workspace

    try:
        Workspace.build(folder, variant)
    except Gemma4CompatError as error:
        return {"missing": str(error)}
    found: dict[str, Any] = {}
    with Forks(folder, "all") as off, Forks(folder, "") as on:
        for patch in patches:
            runs = {"off": off(patch.id), "on": on(patch.id)}
            if runs["off"]["defect"] and not is_its_own(patch, runs["off"]):
                runs["alone"] = on(f"{patch.id}:alone")
            found[patch.id] = {
                "verdict": verdict(patch, runs),
                **{name: {key: run[key] for key in SHOWN} for name, run in runs.items()},
            }
            print(f"{variant:<8} {patch.id:<38} {found[patch.id]['verdict']:<15} {said(runs)}", flush=True)
    return found


def is_its_own(patch: gemma4_compat.Patch, run: Mapping[str, Any]) -> bool:
    """Whether a defect that was seen is the patch's: with everything off another one may come first."""
    tests = importlib.import_module(f"tests.patches.{registry.AREA_OF[patch.id]}.test_{patch.id.replace('-', '_')}")
    return re.search(tests.TestPromise.original, run["detail"]) is not None


def verdict(patch: gemma4_compat.Patch, runs: Mapping[str, Mapping[str, Any]]) -> str:
    off, on = runs["off"], runs["on"]
    if on["defect"]:
        return UNREPAIRED if off["defect"] else BROKEN
    if not on["applicable"]:
        return NOT_APPLICABLE
    seen = runs.get("alone", off)
    return REPAIRED if seen["defect"] and on["state"] == "applied" else NOT_AFFECTED


def said(runs: Mapping[str, Mapping[str, Any]]) -> str:
    off, on = runs.get("alone", runs["off"]), runs["on"]
    return f"{off['detail'][:70]} -> {on['detail'][:70]}" if off["defect"] or on["defect"] else str(on["detail"])[:110]


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """The committed results by stack, the newest transformers first."""
    found = evidence.variants(patches=[patch.id for patch in gemma4_compat.patches()])
    order = sorted(found, key=lambda name: Version(found[name]["versions"]["transformers"]), reverse=True)
    return {name: found[name] for name in order}


def page() -> str:
    """docs/VARIANTS.md."""
    stacks = results()
    head = ["| " + " | ".join(["", *variants.NAMES]) + " |", "|" + "---|" * (1 + len(variants.NAMES))]
    return "\n".join(
        [
            "# The variants of Gemma 4",
            "",
            generated("docs/evidence/variants.json"),
            "",
            "Each variant's configuration is made small: every switch and the pattern of its layers stay as",
            "they are, the numbers shrink. On each of them every patch's reproduction runs with the shim off",
            "and on (`python tools/variants.py NAME`), on the CPU, with the disk in the place of host memory.",
            "What was found is in the entry of [each patch](PATCHES.md). **repaired**:",
            "the defect is there without the patch and gone with it, the answers equal to those of one device; **not",
            "affected**: the situation exists and has no defect; **not applicable**: the variant has nothing of what",
            "it is about.",
            "",
            *(
                f"- **{name}**: "
                + ", ".join(f"{library} {run['versions'][library]}" for library in findings.STACK)
                + "".join(
                    f"; not the {variant}: {found['missing']}"
                    for variant, found in run["variants"].items()
                    if "missing" in found
                )
                for name, run in stacks.items()
            ),
            "",
            "## What they are made of",
            "",
            *head,
            *(
                f"| {text} | "
                + " | ".join("yes" if part in variants.parts(name) else "no" for name in variants.NAMES)
                + " |"
                for part, text in variants.PARTS.items()
                if part not in ("gemma4", "unified")
            ),
            "",
            "The 12B's classes are those of `gemma4_unified`, which has embedders in the place of towers.",
            "",
        ]
    )


def summary() -> list[str]:
    """How often each verdict was found, for docs/EVIDENCE.md."""
    lines = []
    for name, run in results().items():
        measured = [found for found in run["variants"].values() if "missing" not in found]
        said = [entry["verdict"] for found in measured for entry in found.values()]
        counts = ", ".join(f"{said.count(kind)} {kind}" for kind in sorted(set(said)))
        lines.append(f"- On small [variants of Gemma 4](docs/VARIANTS.md), stack {name}, {run['date']}: {counts}")
    return lines


def line(patch_id: str) -> str:
    """What a patch does on the variants: a verdict and where it was found; what is not applicable says why."""
    runs = results()
    had = {
        variant: [name for name, run in runs.items() if "missing" not in run["variants"][variant]]
        for variant in variants.NAMES
    }
    where: dict[str, dict[str, list[str]]] = {}
    for variant, names in had.items():
        for name in names:
            entry = runs[name]["variants"][variant].get(patch_id, {"verdict": UNKNOWN})
            why = f" ({entry['on']['detail']})" if entry["verdict"] == NOT_APPLICABLE else ""
            where.setdefault(entry["verdict"] + why, {}).setdefault(variant, []).append(name)
    said = []
    for verdict, places in where.items():
        listed = [
            variant if names == had[variant] else f"{variant} in {' and '.join(names)}"
            for variant, names in places.items()
        ]
        said.append(f"{verdict}: {'all' if places == had else ', '.join(listed)}")
    return "; ".join(said)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--variants", nargs="+", choices=variants.NAMES, default=variants.NAMES)
    parser.add_argument("--patches", nargs="+", default=[])
    options = parser.parse_args(argv)
    patches = [patch for patch in gemma4_compat.patches() if not options.patches or patch.id in options.patches]
    known = results().get(options.name, {"variants": {}})["variants"]
    every = [patch.id for patch in gemma4_compat.patches()]
    found: dict[str, Any] = {}
    for variant in variants.NAMES:
        found[variant] = known.get(variant, {})
        if variant not in options.variants:
            continue
        with tempfile.TemporaryDirectory() as folder:
            fresh = measure(variant, patches, Path(folder))
        joined = fresh if "missing" in fresh else {**found[variant], **fresh}
        found[variant] = {key: joined[key] for key in ["missing", *every] if key in joined}
        result = {
            "versions": findings.stack(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "variants": {**known, **found},
        }
        evidence.write_variants(options.name, result, [(variant, name) for name in fresh if name != "missing"])
    bad = [
        f"{variant} {name}"
        for variant, rows in found.items()
        for name, row in rows.items()
        if name != "missing" and row["verdict"] in (UNREPAIRED, BROKEN)
    ]
    print(f"wrote {evidence.EVIDENCE.relative_to(ROOT)}; not repaired: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
