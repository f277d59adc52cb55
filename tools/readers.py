"""Which readers load what is written here: every variant, every writer, every reader; docs/READERS.md and its data.

python -m tools.readers run READER==RELEASE@PYTHON[:FOLDER] ...   docs/evidence/readers.json and the page
python -m tools.readers page                                      the page alone

PYTHON is that of an environment with the reader, as `pip install 'mlx[cpu]' mlx-lm` makes one; FOLDER has another
release of it (pip install --target). Checkpoints are tiny ones with random weights. Outputs are logits of
one text in float32; next to a difference stands transformers' own, between float32 and float64.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "docs" / "evidence" / "readers.json", ROOT / "docs" / "READERS.md"
CHILD = ROOT / "tools" / "reader_child.py"
BEGIN, END = "<!-- tables: python -m tools.readers page -->\n", "<!-- end of tables -->\n"
IDS = [5, 9, 17, 33, 2, 64, 100, 7, 8, 91, 10, 11]
#: Largest difference of logits that counts as equal, in differences of transformers between float32 and float64.
BOUND = 16
WRITERS = {
    "released": "as released",
    "transformers": "`save_pretrained` without this package",
    "before": "the same before transformers 5.15.0",
    "patched": "`save_pretrained` with it",
    "repair": "that of transformers, repaired",
    "merge": "`gemma4-compat merge`",
    "qlora": "QLoRA in 4 bits, then `gemma4-compat merge`",
}
_SAVE = """
import pathlib, sys
from gemma4_compat._lab import tiny
for pair in sys.argv[1:]:
    source, target = pair.split(",")
    tiny.load(pathlib.Path(source)).save_pretrained(target)
"""
_TRAIN = """
import pathlib, sys, torch
from gemma4_compat._lab import tiny
from peft import LoraConfig, get_peft_model
for pair in sys.argv[1:]:
    source, target = pair.split(",")
    targets = r".*language_model.*\\.(q_proj|o_proj|up_proj)"
    model = get_peft_model(tiny.load(pathlib.Path(source), "4bit"), LoraConfig(r=4, target_modules=targets))
    ids = torch.arange(5, 17)[None]
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-2)
    model.train()
    for _ in range(3):
        model(input_ids=ids, labels=ids, mm_token_type_ids=torch.zeros_like(ids)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(target)
"""


def written(folders: list[Path]) -> None:
    """Every writer's checkpoint of each variant, in the folder with its name in the variant's folder."""
    import gemma4_compat
    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny_adapters, tiny_models

    targets = r".*language_model.*\.(q_proj|o_proj|up_proj)"
    for folder in folders:
        base = tiny_models.build_checkpoint(folder / "base", variant=folder.name)
        released = tiny_models.build_released(base, folder / "released")
        if folder.name == variants.UNIFIED:  # a constant of readers; transformers computes it
            settings = json.loads((released / "config.json").read_text(encoding="utf-8"))
            vision = settings["vision_config"]
            vision["model_patch_size"] = vision["patch_size"] * vision["pooling_kernel_size"]
            (released / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    _child(_SAVE, folders, "transformers", GEMMA4_COMPAT_DISABLE="all")
    _child(_SAVE, folders, "patched")
    _child(_TRAIN, folders, "trained")
    for folder in folders:
        released = folder / "released"
        named(folder / "transformers", folder / "before")
        gemma4_compat.repair_checkpoint(folder / "transformers", released, folder / "repair")
        tiny_adapters.write_adapter(_model(released), targets, folder / "adapter")
        for adapter, out in (("adapter", "merge"), ("trained", "qlora")):
            gemma4_compat.merge_adapter(released, folder / adapter, folder / out, check=0, progress=False)


def named(checkpoint: Path, out: Path) -> None:
    """A copy with the names of settings that transformers wrote before 5.15.0; the tensors are the same."""
    from gemma4_compat._gemma4.models import config_names

    shutil.copytree(checkpoint, out)
    settings = json.loads((out / "config.json").read_text(encoding="utf-8"))
    settings["text_config"] |= config_names.restored(settings["text_config"])
    del settings["text_config"]["per_layer_config"]
    (out / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def _child(code: str, folders: list[Path], out: str, **settings: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GEMMA4_COMPAT_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *(f"{folder / 'released'},{folder / out}" for folder in folders)],
        env=environment | {"PYTHONPATH": str(ROOT)} | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)


def _model(checkpoint: Path, dtype: Any = None) -> Any:
    from gemma4_compat._lab import tiny

    return tiny.load(checkpoint, dtype=dtype)


def logits(checkpoint: Path, dtype: str) -> Any:
    """Of transformers, in float64."""
    import torch

    model = _model(checkpoint, getattr(torch, dtype))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS])).logits[0].double()


def read(reader: str, python: str, also: str, checkpoints: list[Path]) -> list[dict[str, Any]]:
    """What a reader makes of each checkpoint: ``error`` and ``logits``."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if also:
        environment["SOURCE" if reader == "vLLM" else "PYTHONPATH"] = also
    done = subprocess.run(
        [python, str(CHILD), reader, json.dumps(IDS), *map(str, checkpoints)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{reader}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"error"')]


def measure(readers: dict[str, tuple[str, str, str]]) -> dict[str, Any]:
    """Every cell; ``readers`` is title -> (reader, python, folder)."""
    import torch

    from gemma4_compat._gemma4.models import variants

    cells = []
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch, name) for name in variants.NAMES]
        written(folders)
        pairs = [(folder, writer) for folder in folders for writer in WRITERS]
        exact = {pair: logits(pair[0] / pair[1], "float64") for pair in pairs}
        own = {pair: (logits(pair[0] / pair[1], "float32") - exact[pair]).abs().max().item() for pair in pairs}
        for title, (reader, python, also) in readers.items():
            answers = read(reader, python, also, [folder / writer for folder, writer in pairs])
            for pair, answer in zip(pairs, answers, strict=True):
                error = answer["error"] and answer["error"].replace(f"{scratch}/", "")
                cell: dict[str, Any] = {"variant": pair[0].name, "writer": pair[1], "reader": title, "error": error}
                if answer["logits"] is not None:
                    found = torch.tensor(answer["logits"], dtype=torch.float64)
                    cell |= {"difference": (found - exact[pair]).abs().max().item(), "own": own[pair]}
                cells.append(cell)
                print(cell, flush=True)
    return {"bound": BOUND, "transformers": _version(), "readers": list(readers), "cells": cells}


def _version() -> str:
    import transformers

    return str(transformers.__version__)


def shown(cell: dict[str, Any], notes: list[str]) -> str:
    """A cell of the table; what went wrong is added to ``notes``."""
    if said := cell["error"]:
        text = said if len(said) <= 200 else f"{said[:200]}..."
        if text not in notes:
            notes.append(text)
        return f"no [{notes.index(text) + 1}]"
    if "difference" not in cell:
        return "yes"
    if cell["difference"] > BOUND * cell["own"]:
        return f"**other outputs**, {cell['difference']:.1e}"
    return f"yes, {cell['difference']:.0e} ({cell['own']:.0e})"


def tables(data: dict[str, Any]) -> str:
    """A table for each reader."""
    names = list(dict.fromkeys(cell["variant"] for cell in data["cells"]))
    lines: list[str] = []
    notes: list[str] = []
    for reader in data["readers"]:
        lines += [f"### {reader}", "", "| written by | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
        for writer, title in WRITERS.items():
            of = {
                cell["variant"]: cell for cell in data["cells"] if (cell["reader"], cell["writer"]) == (reader, writer)
            }
            lines.append(f"| {title} | " + " | ".join(shown(of[name], notes) for name in names) + " |")
        lines.append("")
    lines += [f"{number}. `{note}`" for number, note in enumerate(notes, 1)]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the tables of the data."""
    text, data = PAGE.read_text(encoding="utf-8"), json.loads(DATA.read_text(encoding="utf-8"))
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(data)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("readers", nargs="+", metavar="READER==RELEASE@PYTHON[:FOLDER]")
    commands.add_parser("page")
    options = parser.parse_args()
    if options.command == "run":
        chosen = {}
        for text in options.readers:
            title, _, place = text.rpartition("@")
            python, _, folder = place.partition(":")
            chosen[title.replace("==", " ")] = (title.partition("==")[0], python, folder)
        DATA.write_text(json.dumps(measure(chosen), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
