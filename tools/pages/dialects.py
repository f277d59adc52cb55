"""The dialects of adapter keys, what each does on each class, and the table of them in docs/ADAPTERS.md.

``python -m tools.pages.dialects`` writes the table; test_peft_adapter_keys.py tries every cell of it.
"""

from __future__ import annotations

import enum
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "ADAPTERS.md"
START, END = "<!-- dialects: start (python -m tools.pages.dialects) -->", "<!-- dialects: end -->"
PREFIX = "base_model.model."
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "ffw_layer_1")
CLASSES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4Model", "Gemma4TextModel")
HAS_TOWERS = frozenset({"Gemma4ForConditionalGeneration", "Gemma4Model"})


class Cell(str, enum.Enum):
    """What happens to an adapter's keys on a class."""

    LOADS = "loads"
    PART = "loads what fits, one warning"
    REFUSED = "refused, nothing changed"

    __str__ = str.__str__


@dataclass(frozen=True)
class Dialect:
    """Keys of one origin.

    Attributes:
        name: where such keys come from.
        source: the adapter of the workspace it is made of, in the keys of ``Gemma4ForConditionalGeneration``.
        rewrite: such a key -> this dialect's.
        on_towers, on_text: what happens on classes with and without towers.
        targets: ``target_modules`` of its config; None leaves what its class saved.
        extra: keys that are in the file beside them, with shapes that fit nothing.
    """

    name: str
    source: str
    rewrite: Callable[[str], str]
    on_towers: Cell = Cell.LOADS
    on_text: Cell = Cell.LOADS
    targets: tuple[str, ...] | str | None = NAMES
    extra: tuple[str, ...] = ()

    def cell(self, cls: str) -> Cell:
        """What happens on a class."""
        return self.on_towers if cls in HAS_TOWERS else self.on_text

    @property
    def export(self) -> str:
        """What ``export`` does with it, of a ``Gemma4ForConditionalGeneration``."""
        return "yes" if self.on_towers is Cell.LOADS else "refused"

    @property
    def example(self) -> str:
        """One of its keys, for the table."""
        if self.extra:
            return self.extra[0]
        tower = self.source != "language"
        layer = "vision_tower.encoder.layers.0.self_attn.q_proj.linear" if tower else _TEXT_LAYER
        return self.rewrite(f"{PREFIX}model.{layer}.lora_A.weight")

    def write(self, adapter: Path, folder: Path) -> Path:
        """Write the adapter in ``adapter`` into ``folder``, in this dialect."""
        import torch
        from safetensors.torch import load_file, save_file

        shutil.copytree(adapter, folder)
        weights = load_file(folder / "adapter_model.safetensors")
        dialect = {self.rewrite(key): value for key, value in weights.items()}
        shape = next(iter(weights.values())).shape
        dialect |= {key: torch.ones(shape) for key in self.extra if key not in dialect}
        save_file(dialect, folder / "adapter_model.safetensors")
        config = json.loads((folder / "adapter_config.json").read_text())
        if self.targets is not None:
            config["target_modules"] = self.targets if isinstance(self.targets, str) else list(self.targets)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder


_TEXT_LAYER = "language_model.layers.0.self_attn.q_proj"


def _stem(stem: str) -> Callable[[str], str]:
    return lambda key: key.replace(f"{PREFIX}model.language_model.", stem, 1)


def _shifted(key: str) -> str:
    return key.replace(f"{PREFIX}model.", f"{PREFIX}model.model.", 1)


DIALECTS = (
    Dialect("`Gemma4ForConditionalGeneration`", "language", str, targets=None),
    Dialect("`Gemma4ForConditionalGeneration`, towers too", "all", str, on_text=Cell.PART, targets=None),
    Dialect("`Gemma4ForConditionalGeneration`, towers only", "towers", str, on_text=Cell.REFUSED, targets=None),
    Dialect(
        "towers on the wrapper, without `.linear`", "all", lambda key: key.replace(".linear.", "."), on_text=Cell.PART
    ),
    Dialect("`Gemma4ForCausalLM`", "language", _stem(f"{PREFIX}model.")),
    Dialect(
        "`Gemma4Model`",
        "language",
        _stem(f"{PREFIX}language_model."),
        targets=r"language_model\..*\.(q|k|v|o|gate|up|down)_proj",
    ),
    Dialect("`Gemma4TextModel`", "language", _stem(PREFIX)),
    Dialect("no prefix", "language", lambda key: key.removeprefix(PREFIX)),
    Dialect("no prefix, text only", "language", _stem("model.")),
    Dialect("prefix twice", "language", lambda key: PREFIX + key),
    Dialect("one `model.` too many", "language", _shifted),
    Dialect("`language_model.model`, the old order", "language", _stem(f"{PREFIX}language_model.model.")),
    Dialect(
        "the adapter's name left in",
        "language",
        lambda key: re.sub(r"(lora_[AB])\.", r"\1.default.", _stem(f"{PREFIX}model.")(key)),
    ),
    Dialect(
        "k/v projections of KV-shared layers",
        "language",
        _stem(f"{PREFIX}model."),
        extra=(f"{PREFIX}model.layers.5.self_attn.k_proj.lora_A.weight",),
    ),
    Dialect(
        "a layer that Gemma 4 does not have, among others",
        "language",
        _stem(f"{PREFIX}model."),
        on_towers=Cell.PART,
        on_text=Cell.PART,
        extra=(f"{PREFIX}model.layers.0.self_attn.qkv_proj.lora_A.weight",),
    ),
    Dialect(
        "another model",
        "language",
        lambda key: key.replace(f"{PREFIX}model.language_model.layers", "transformer.h").replace("self_attn", "attn"),
        on_towers=Cell.REFUSED,
        on_text=Cell.REFUSED,
    ),
)


def table() -> str:
    """The table of docs/ADAPTERS.md: each dialect on each class."""
    rows = ["| keys from | such as | " + " | ".join(f"`{name}`" for name in CLASSES) + " | `export` |"]
    rows.append("|" + "---|" * (3 + len(CLASSES)))
    for dialect in DIALECTS:
        cells = " | ".join(str(dialect.cell(name)) for name in CLASSES)
        rows.append(f"| {dialect.name} | `{dialect.example}` | {cells} | {dialect.export} |")
    return "\n".join(rows)


def page(text: str) -> str:
    """``text`` with the table as it should be."""
    return between(text, START, END, table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
