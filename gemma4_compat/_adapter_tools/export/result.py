"""What an export returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What an export wrote, and for which reader.

    Attributes:
        out: the folder.
        adapter: its folder.
        target: "vllm", "sglang", "mlx", "gguf" or "peft".
        reader: the release whose source determined what was written.
        base: of the adapter, as ``from_pretrained`` takes it.
        model_class: the base's class in ``transformers``.
        modules: number of adapted modules; a parameter of all experts counts as one.
        rank: of every module; None if the adapter is not a LoRA.
        scale: factor for the product of the two matrices; None if the adapter is not a LoRA.
        padded: modules of a smaller rank, which got zeros.
        rescaled: modules with a different scale, which was folded into ``lora_B`` and rounded.
        added: modules the reader needs but the adapter has no weights for: zeros, or a copy of those of their keys.
        dead: the adapter's keys for modules that this model never uses; they were dropped.
        files: names of the files.
        nbytes: of all files.
        command: a command or call that loads it.
        notes: other things to know.
    """

    out: str
    adapter: str
    target: str
    reader: str
    base: str
    model_class: str
    modules: int
    rank: int | None
    scale: float | None
    padded: tuple[str, ...]
    rescaled: tuple[str, ...]
    added: tuple[str, ...]
    dead: tuple[str, ...]
    files: tuple[str, ...]
    nbytes: int
    command: str
    notes: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self)
