"""What an adapter's file shows by itself: the ranks of its LoRA layers, and layers that are not complete."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable

from gemma4_compat._adapter_tools.scan.result import Findings
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import translation
from gemma4_compat._gemma4.adapters.saved import CONFIG, WEIGHTS, SavedAdapter
from gemma4_compat._gemma4.checkpoint import header

#: A key of one of the two matrices of a LoRA layer: the stem, and A or B.
HALF = re.compile(r"(?s)(.+)\.lora_(?:embedding_)?([AB])(?:\.|$)")


class Ranks:
    """The ranks of an adapter's LoRA layers, by the stem of their keys.

    Raises:
        Gemma4CompatError: ``r`` or ``rank_pattern`` in the configuration cannot be understood.
    """

    def __init__(self, saved: SavedAdapter, peft_type: str) -> None:
        self._saved = saved
        self._rank, self._patterns = _configured(saved) if peft_type == "LORA" else (1, {})

    def configured(self, stem: str) -> int:
        """The rank that ``r`` and ``rank_pattern`` give a layer."""
        module = stem.removeprefix(translation.PREFIX).removesuffix(".base_layer")
        names = (module, module.removesuffix(".linear"))
        for pattern, rank in self._patterns.items():
            if any(pattern.match(name) for name in names):
                return rank
        return self._rank

    def in_file(self) -> dict[str, int]:
        """The rank of each layer in the file. One over experts has the ranks of all experts in a row."""
        ranks = {}
        for key, tensor in self._saved.tensors.items():
            half = HALF.match(key)
            if half and half[2] == "A" and len(tensor.shape) == 2:
                rank, configured = tensor.shape[0], self.configured(half[1])
                of_experts = self._is_parameter(half[1]) and rank % configured == 0
                ranks[half[1]] = configured if of_experts else rank
        return ranks

    def _is_parameter(self, stem: str) -> bool:
        module = stem.removesuffix(".base_layer")
        targets = self._saved.config.get("target_parameters") or ()
        return any(f".{module}".endswith(f".{name.rpartition('.')[0]}") for name in targets)


def check(saved: SavedAdapter, peft_type: str, ranks: Ranks | None, findings: Findings) -> None:
    """Add what is wrong with the file; with ``ranks``, also where they differ from the configuration."""
    tensors = saved.tensors
    damaged = dict(header.problems(saved.folder / WEIGHTS, tensors))
    findings.add(
        "damaged",
        "{count} tensors are not stored in the file as safetensors requires, so nothing loads it. {first} "
        f"{next(iter(damaged.values()), '')}. Get it again",
        damaged,
    )
    if not tensors:
        findings.add("empty", "the file has no weights at all: the adapter was saved wrongly", ())
    findings.add(
        "flat",
        "{count} LoRA weights are empty or flat, such as {first}: they were saved in pieces (ZeRO-3 or FSDP). "
        "Gather the parameters before saving",
        [key for key, tensor in tensors.items() if HALF.match(key) and (len(tensor.shape) < 2 or 0 in tensor.shape)],
    )
    if peft_type != "LORA":
        return
    halves: dict[str, dict[str, str]] = {}
    for key in tensors:
        if half := HALF.match(key):
            halves.setdefault(half[1], {})[half[2]] = key
    findings.add(
        "half",
        "{count} LoRA layers have only one of A and B, such as {first}: the file is not complete",
        [key for parts in halves.values() if len(parts) == 1 for key in parts.values()],
    )
    if ranks is None:
        return
    wrong = [halves[stem]["A"] for stem, rank in ranks.in_file().items() if rank != ranks.configured(stem)]
    wrong += [
        parts["B"]
        for parts in halves.values()
        if len(parts) == 2
        and len(tensors[parts["A"]].shape) == len(tensors[parts["B"]].shape) == 2
        and tensors[parts["A"]].shape[0] != tensors[parts["B"]].shape[1]
    ]
    shown = f" ({shape_text(tensors[wrong[0]].shape)})" if wrong else ""
    findings.add(
        "rank",
        f"{{count}} LoRA weights have a rank that differs from {CONFIG}, such as {{first}}{shown}: "
        "configuration and weights belong to two different adapters",
        wrong,
    )


def shape_text(shape: Iterable[int]) -> str:
    """A shape for a message."""
    return json.dumps(list(shape))


def _configured(saved: SavedAdapter) -> tuple[int, dict[re.Pattern[str], int]]:
    """``r`` and ``rank_pattern``, matched as PEFT does: the first pattern that fits the end of a module's name."""
    file = str(saved.folder / CONFIG)
    rank, patterns = saved.config.get("r", 8), saved.config.get("rank_pattern") or {}
    ranks = [rank, *patterns.values()] if isinstance(patterns, dict) else [None]
    if not all(type(value) is int and value > 0 for value in ranks):
        raise Gemma4CompatError(
            f"r and rank_pattern in {file!r} are {reprlib.repr(rank)} and {reprlib.repr(patterns)}; they must be a "
            "positive number, and positive numbers by pattern"
        )
    try:
        return rank, {re.compile(rf"(.*\.)?({pattern})$"): value for pattern, value in patterns.items()}
    except re.error as error:
        raise Gemma4CompatError(f"a rank_pattern in {file!r} is not a regular expression: {error}") from error
