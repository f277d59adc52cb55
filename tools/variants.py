"""Reproduce every patch's defect on each variant of Gemma 4, made small, and write what was found to docs/variants.

python tools/variants.py NAME                         every patch on every variant, in this environment
python tools/variants.py NAME --variants 12B          on some variants, beside what is known of the others
python tools/variants.py NAME --patches PATCH         one patch, beside what is known of the others

NAME is the stack's, and of its results file; tools/docs.py makes docs/VARIANTS.md of them. Each reproduction runs with
the shim off and on, in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "variants"
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gemma4_compat  # noqa: E402
from gemma4_compat import Gemma4CompatError, _doctor, _variants  # noqa: E402
from tests.reproductions import Forks  # noqa: E402

REPAIRED = "repaired"
NOT_AFFECTED = "not affected"
NOT_APPLICABLE = "not applicable"
UNREPAIRED = "NOT REPAIRED"
BROKEN = "BROKEN BY THE PATCH"
#: Kept of a reproduction's result.
SHOWN = ("defect", "detail", "parity", "applicable")


def measure(variant: str, patches: Sequence[gemma4_compat.Patch], folder: Path) -> dict[str, Any]:
    """Verdict and results of each patch on one variant; ``{"missing": why}`` where this stack has no such variant."""
    from gemma4_compat._repro import Workspace

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
    tests = importlib.import_module(f"tests.patches.test_{patch.id.replace('-', '_')}")
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name")
    parser.add_argument("--variants", nargs="+", choices=_variants.NAMES, default=_variants.NAMES)
    parser.add_argument("--patches", nargs="+", default=[])
    options = parser.parse_args(argv)
    patches = [patch for patch in gemma4_compat.patches() if not options.patches or patch.id in options.patches]
    file = RESULTS / f"{options.name}.json"
    known = json.loads(file.read_text(encoding="utf-8"))["variants"] if file.exists() else {}
    every = [patch.id for patch in gemma4_compat.patches()]
    found: dict[str, Any] = {}
    for variant in _variants.NAMES:
        found[variant] = known.get(variant, {})
        if variant not in options.variants:
            continue
        with tempfile.TemporaryDirectory() as folder:
            fresh = measure(variant, patches, Path(folder))
        joined = fresh if "missing" in fresh else {**found[variant], **fresh}
        found[variant] = {key: joined[key] for key in ["missing", *every] if key in joined}
        result = {
            "versions": _doctor.stack(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "variants": {**known, **found},
        }
        RESULTS.mkdir(exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    bad = [
        f"{variant} {name}"
        for variant, rows in found.items()
        for name, row in rows.items()
        if name != "missing" and row["verdict"] in (UNREPAIRED, BROKEN)
    ]
    print(f"wrote {file.relative_to(ROOT)}; not repaired: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
