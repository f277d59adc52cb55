"""One case of the search over operations: a tiny Gemma 4, a map, and what a user does with the model, in order.

``sequence_rules.py`` draws them, ``operations.py`` says what each operation does, ``sequence_shrinking.py`` makes them
shorter, ``sequences_run.py`` has what must hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.generated.search.case import Case


@dataclass(frozen=True)
class Operation:
    """A name of ``operations.OPERATIONS`` and its arguments, in the order of their names."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options)})"


def operation(name: str, **options: Any) -> Operation:
    return Operation(name, tuple(sorted(options.items())))


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """See :func:`generate`.

    Attributes:
        case: the model, how it is loaded, and its first map. ``offloaded_to="cpu"`` is host memory also where the
            model computes on the CPU. It has no adapter: adapters come by operations.
        operations: in order.
        seed: where the sequence comes from; None once it was shrunk.
    """

    case: Case
    operations: tuple[Operation, ...]
    seed: int | None = None

    def to_json(self) -> str:
        steps = [[step.name, dict(step.options)] for step in self.operations]
        return json.dumps({"seed": self.seed, "case": json.loads(self.case.to_json()), "operations": steps})

    @classmethod
    def from_json(cls, text: str) -> Sequence:
        data = json.loads(text)
        steps = tuple(
            operation(name, **{k: _frozen(v) for k, v in given.items()}) for name, given in data["operations"]
        )
        return cls(case=Case.from_json(json.dumps(data["case"])), operations=steps, seed=data["seed"])


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
