"""What a merge returns, and the error if its outputs are out of bounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gemma4_compat._adapter_tools.merge.check import Parity
from gemma4_compat._errors import Gemma4CompatError


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What was merged into what, and how the outputs compare.

    Attributes:
        out: folder of the merged model.
        base: of the base, as given; ``adapter`` likewise.
        model_class: the class in ``transformers`` that the folder loads as.
        start: "original" or "dequantized".
        quantization: what "dequantized" stands for: "4bit", "4bit-double" or "8bit"; None for "original".
        assumed: whether that was assumed, because neither the base nor the caller stated it.
        dtype: of the merged weights: "bf16", "fp16" or "fp32".
        peft_type: of the adapter.
        modules: number of modules the adapter was merged into.
        replaced: tensors that the adapter replaced as a whole.
        dequantized: weights that went through the quantization and back.
        dead: the adapter's keys for modules that this model never uses; they were dropped.
        absent: modules that the adapter's configuration names but its file has no weights for.
        untied: whether the head got its own weights.
        files: names of the weight files.
        nbytes: of the weights.
        seconds: of the merge and of the check.
        versions: of the libraries.
        parity: the result of the check; None if there was no check.
        adapters: every adapter, as given -> its weight.
        resumed: names of the weight files of a killed merge that were kept; "merged/..." belong to the merged model
            before it was quantized.
        quantized_as: how the result is quantized: "4bit", "4bit-double" or "8bit"; None if it is not.
        quantized_parity: of the quantized result; ``parity`` is that of the merge before it was quantized.
    """

    out: str
    base: str
    adapter: str
    model_class: str
    start: str
    quantization: str | None
    assumed: bool
    dtype: str
    peft_type: str
    modules: int
    replaced: int
    dequantized: int
    dead: tuple[str, ...]
    absent: tuple[str, ...]
    untied: bool
    files: tuple[str, ...]
    nbytes: int
    seconds: dict[str, float]
    versions: dict[str, str]
    parity: Parity | None = field(default=None)
    adapters: dict[str, float] = field(default_factory=dict)
    resumed: tuple[str, ...] = ()
    quantized_as: str | None = None
    quantized_parity: Parity | None = None

    @property
    def ok(self) -> bool:
        """Whether every comparison is within bounds."""
        return all(parity is None or parity.ok for parity in (self.parity, self.quantized_parity))

    def as_data(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        data = asdict(self)
        for name, parity in (("parity", self.parity), ("quantized_parity", self.quantized_parity)):
            if parity is not None:
                data[name]["ok"] = parity.ok
        return data


class MergeParityError(Gemma4CompatError):
    """The merged model's outputs differ from the adapter's; nothing was kept. ``report`` has the measurements."""

    def __init__(self, message: str, report: MergeReport) -> None:
        super().__init__(message)
        self.report = report
