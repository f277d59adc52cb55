"""The tuners of PEFT, what each does on plain and on 4-bit bases, and the table of them in docs/ADAPTERS.md.

``python -m tools.pages.tuners`` writes the table; tests/unit/gemma4/adapters/test_tuners.py tries every cell of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "ADAPTERS.md"
START, END = "<!-- tuners: start (python -m tools.pages.tuners) -->", "<!-- tuners: end -->"
TARGETS = ["q_proj", "o_proj", "up_proj", "down_proj", "ffw_layer_1"]
NEVER, ALWAYS = "", "0"


@dataclass(frozen=True)
class Tuner:
    """A way of PEFT to adapt linears.

    Attributes:
        name: what people call it.
        kind, fields: its config's class, and that class's arguments besides the targets.
        runs, merges: since which PEFT it runs on a 4-bit base, and merges into one.
        rate: at which two steps of training change the answers.
    """

    name: str
    kind: str = "LoraConfig"
    fields: dict[str, Any] = field(default_factory=lambda: {"r": 4})
    runs: str = ALWAYS
    merges: str = ALWAYS
    rate: float = 0.1

    def config(self) -> Any:
        """PEFT's configuration of it, with :data:`TARGETS`."""
        import peft

        return getattr(peft, self.kind)(target_modules=TARGETS, **self.fields)

    @property
    def row(self) -> str:
        """Its row of the table."""
        runs = {NEVER: "refused", ALWAYS: "yes"}.get(self.runs, f"since PEFT {self.runs}")
        merges = {NEVER: "refused", ALWAYS: "with a loss it says"}.get(
            self.merges, f"since PEFT {self.merges}, with a loss it says"
        )
        return f"| {self.name} | yes | {runs} | {merges if self.runs != NEVER else '-'} |"


TUNERS = (
    Tuner("LoRA"),
    Tuner("DoRA", fields={"r": 4, "use_dora": True}),
    Tuner("rsLoRA", fields={"r": 4, "use_rslora": True}),
    Tuner("PiSSA", fields={"r": 4, "init_lora_weights": "pissa"}, runs=NEVER, merges=NEVER),
    Tuner("OLoRA", fields={"r": 4, "init_lora_weights": "olora"}),
    Tuner("orthogonal", fields={"r": 4, "init_lora_weights": "orthogonal"}, runs=NEVER, merges=NEVER),
    Tuner("LoHa", "LoHaConfig", runs=NEVER, merges=NEVER),
    Tuner("LoKr", "LoKrConfig", runs=NEVER, merges=NEVER),
    Tuner("IA3", "IA3Config", {"feedforward_modules": ["down_proj"]}, merges=NEVER),
    Tuner("AdaLoRA", "AdaLoraConfig", {"init_r": 4, "target_r": 2, "total_step": 10}, merges=NEVER, rate=5.0),
    Tuner("VeRA", "VeraConfig", merges="0.20"),
    Tuner("RandLoRA", "RandLoraConfig", {"r": 8}, merges=NEVER),
    Tuner("RoAd", "RoadConfig", {"group_size": 32}),
    Tuner("OFT", "OFTConfig", {"r": 0, "oft_block_size": 32}, merges="0.21"),
    Tuner("BOFT", "BOFTConfig", {"boft_block_size": 4}, runs="0.20", merges="0.20"),
    Tuner("HRA", "HRAConfig", runs=NEVER, merges=NEVER),
)


def table() -> str:
    """The table of docs/ADAPTERS.md."""
    rows = ["| tuner | bf16: train, reload, merge | 4-bit: train, reload | 4-bit: merge |", "|---|---|---|---|"]
    return "\n".join([*rows, *(tuner.row for tuner in TUNERS)])


def page(text: str) -> str:
    """``text`` with the table as it should be."""
    return between(text, START, END, table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
