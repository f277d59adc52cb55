"""What replay sequences are run with: one model, and what must be undone when it goes."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.generated.search.case import OFFLOADED, Case
from tests.generated.search.sequences_bench import SequenceBench, World


class ReplayWorld(World):
    """A model, on one device or with layers in host memory, as the case has it.

    Attributes:
        undone: what a change outside of the model registers: hooks of all modules, functions of classes.
        saved: folders of adapters, by number.
    """

    def __init__(self, bench: SequenceBench, case: Case) -> None:
        super().__init__(bench, case, split=OFFLOADED in dict(case.placement).values())
        self.undone = contextlib.ExitStack()
        self.saved: list[Any] = []

    def close(self) -> None:
        self.undone.close()
        super().close()

    @property
    def base(self) -> Any:
        """The transformers model, also where PEFT has lost the active adapter."""
        found = self.model
        while "peft" in type(found).__module__:
            found = (
                found.base_model if hasattr(found, "peft_config") and "base_model" in found._modules else found.model
            )
        return found

    def layer(self, index: int) -> Any:
        return self.text.layers[index]

    def part(self, layer: int, part: str) -> Any:
        """A module of a layer, inside of adapters."""
        found = self.layer(layer).get_submodule(part)
        return found.get_base_layer() if hasattr(found, "get_base_layer") else found
