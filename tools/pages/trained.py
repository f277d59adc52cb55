"""The measured parts of docs/TRAINED_MODEL.md: what the model learned, and what ``doctor --show`` said."""

from __future__ import annotations

import json
from typing import Any

from gemma4_compat._diagnostics.scenes import SCENES
from gemma4_compat._reproduction.trained import PLACE
from tools.pages.markers import ROOT, shorten

_KINDS = {
    "picture": "pictures, drawn anew",
    "unseen_colour": "the colour in pictures of a shape in a colour that training never showed together",
    "unseen": "colour and shape in these",
    "sound": "sounds, drawn anew",
    "fact": "facts",
    "docstring": "docstrings",
    "addition": "additions",
    "reading": "who has which thing, drawn anew",
    "adapter": "pictures, sounds, facts and docstrings, with the adapter, as a pirate",
}


def learned() -> str:
    """Held-out loss, right answers by kind, and size; of another training as well."""
    kept, again = _measured(), _again()
    size = sum(file.stat().st_size for file in (ROOT / PLACE).rglob("*") if file.is_file()) / 1e6
    rows = [f"| {title} | {kept['right'][kind]:.1%} | {again['right'][kind]:.1%} |" for kind, title in _KINDS.items()]
    device, minutes = kept["training"]["device"].upper(), kept["training"]["minutes"]
    return (
        f"Trained here on one thread of a {device} in {minutes} minutes, beside other work on the machine; again "
        f"from nothing, by the script in one run, in {again['training']['minutes']}. All files have {size:.1f} MB. "
        f"Held-out loss: {kept['held_out_loss']:.3f} nats a token of the answers, and {again['held_out_loss']:.3f}. "
        "Answers that are right, word for word, on 200 questions of each kind:\n\n"
        "| questions | this model | trained again |\n|---|---:|---:|\n" + "\n".join(rows)
    )


def drafts() -> str:
    """What the assistant drafts."""
    found = _measured()["drafts"]
    return (
        f"Given all before it, the first of four drafts is right in {found['right'][0]:.1%}, the fourth in "
        f"{found['right'][-1]:.1%}. With four drafts, a forward of the model gives {found['tokens_a_forward']:.1f} "
        "tokens of a greedy answer; with the pirate adapter, which the assistant does not have, "
        f"{found['with_adapter']:.1f}."
    )


def compared() -> str:
    """Answers of quantized and merged models."""
    kept, again = _measured()["compared"], _again()["compared"]
    rows = [
        f"| {name} | "
        + " | ".join(f"{run[name]['right']:.1%} | {run[name]['nats']:.4f}" for run in (kept, again))
        + " |"
        for name in kept
    ]
    heads = "| model | right answers | nats from the first of its kind | trained again | nats |"
    return "\n".join((heads, "|---|---:|---:|---:|---:|", *rows))


def shown() -> str:
    """What the model answered without the shim and with it, on each stack."""
    parts = []
    for file in sorted((ROOT / "docs" / "evidence" / "show").glob("*.json")):
        run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        stack = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        rows = [f"**{file.stem}**: {stack}.", "", "| patch | what is done | without | with |", "|---|---|---|---|"]
        for patch_id, answer in run["answers"].items():
            without, with_shim = (shorten(answer[side], 80) for side in ("without", "with"))
            rows.append(f"| `{patch_id}` | {SCENES[patch_id].does} | {without} | {with_shim} |")
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / PLACE / "measured.json").read_text(encoding="utf-8"))
    return found


def _again() -> dict[str, Any]:
    """What a second run of the training script from nothing measured."""
    found: dict[str, Any] = json.loads((ROOT / "docs" / "evidence" / "trained_again.json").read_text(encoding="utf-8"))
    return found
