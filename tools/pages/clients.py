"""docs/CLIENTS.md: what software on top of the libraries was given a split model, from the committed runs."""

from __future__ import annotations

import json
import re

from tools.pages.markers import ROOT

_INTRODUCTION = """\
# Clients

Software that takes a model object and uses its device, its outputs or its weights. Each test gives it the tiny model
on one device, then the same model with modules on disk or in host memory, and compares every number, text and trained
weight: they must be bit-identical. `nox -s clients` runs them on a CPU, without a hub; this page is
generated from its last results.

What they need: [`transformers-model-device`](PATCHES.md#transformers-model-device),
[`transformers-pipeline-device`](PATCHES.md#transformers-pipeline-device), and for training
[`accelerate-train-offloaded`](PATCHES.md#accelerate-train-offloaded).

**Keep `lm_head` (and `embed_tokens`, to which it is tied) on the accelerator for TRL.** Its trainers multiply by
`lm_head.weight` themselves, outside the head's forward, where no hook onloads an offloaded weight, so they raise and
nothing is trained. `Trainer` calls the head and has no such limit.
"""
_FILES = {
    "test_lm_eval": "lm-evaluation-harness: `HFLM(pretrained=model)`",
    "test_pipelines": "transformers' `pipeline(...)`",
    "test_trainer": "`Trainer` with resume, `AutoPeftModelForCausalLM`",
    "test_trl": "TRL: `SFTTrainer`, `DPOTrainer`",
}


def page() -> str:
    """docs/CLIENTS.md, whole."""
    parts = [_INTRODUCTION]
    for file in sorted((ROOT / "docs" / "evidence" / "clients").glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        stack = ", ".join(f"{name} {version}" for name, version in sorted(run["versions"].items()))
        rows = ["| client | passed | failed | skipped |", "|---|---|---|---|"]
        for name, title in _FILES.items():
            outcomes = [found for test, found in run["outcomes"].items() if test.startswith(f"{name}.py")]
            counts = [outcomes.count(outcome) for outcome in ("passed", "failed", "skipped")]
            rows.append(f"| {title} | {' | '.join(map(str, counts))} |")
        failed = [test for test, found in run["outcomes"].items() if found == "failed"]
        listed = "".join(f"\n- failed: `{re.sub('::', ' ', test)}`" for test in failed)
        raw = f"[raw](evidence/clients/{file.name})"
        title = f"## transformers {run['versions']['transformers']}"
        parts.append(f"{title}\n\n{stack} ({raw})\n\n" + "\n".join(rows) + f"\n{listed}")
    return "\n".join(parts).rstrip() + "\n"
