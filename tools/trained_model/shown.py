"""What ``doctor --show`` says of every defect that it has, on the stack of this interpreter.

``python -m tools.trained_model.shown NAME`` writes docs/evidence/show/NAME.json, which docs/TRAINED_MODEL.md shows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gemma4_compat
from gemma4_compat._doctor.reproductions import children, findings, scenes, show
from gemma4_compat._lab.trained import Trained

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "show"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="of the stack, as in constraints/")
    parser.add_argument("--only", help="ids, with commas; the others stay as they were")
    chosen = parser.parse_args(argv)
    file = FOLDER / f"{chosen.name}.json"
    before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["answers"] if file.exists() else {}
    trained, answers = Trained.find(), {}
    patches = {patch.id: patch for patch in gemma4_compat.patches()}
    with children.Forks(trained.folder, "all") as off, children.Forks(trained.folder) as on:
        for patch_id in scenes.SCENES:
            if chosen.only and patch_id not in chosen.only.split(","):
                answers |= {patch_id: before[patch_id]} if patch_id in before else {}
                continue
            shown = show.Shown(patches[patch_id], *(side(f"show {patch_id}") for side in (off, on)))
            print(f"{shown.text()}\n", flush=True)
            answers[patch_id] = {
                "without": show.said(shown.without),
                "with": show.said(shown.with_shim),
                "good": shown.good,
            }
    FOLDER.mkdir(exist_ok=True)
    data = {"versions": findings.stack(), "answers": answers}
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0 if all(answer["good"] for answer in answers.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
