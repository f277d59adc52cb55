"""What an export returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written for whom.

    Attributes:
        out: the folder.
        adapter: its folder.
        target: "vllm", "sglang", "mlx", "gguf" or "peft".
        reader: the release whose source says what is written.
        base: of the adapter, as ``from_pretrained`` takes it.
        model_class: the base's class in ``transformers``.
        modules: how many are adapted; a parameter of all experts counts as one.
        rank: of every module; None where the adapter is not a LoRA.
        scale: what the product of the two matrices is multiplied with, likewise.
        padded: modules of a smaller rank, which got zeros.
        rescaled: modules of another scale, whose ``lora_B`` was multiplied and rounded.
        added: modules the adapter has nothing for and the reader wants: zeros, or the same as their keys.
        dead: the adapter's keys for modules that this model never uses; they were dropped.
        files: names of the files.
        nbytes: of all files.
        command: what loads it.
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
        """Everything, as plain data."""
        return asdict(self)
