"""What a release of this package got wrong, found by a search and shrunk by it: a row each of ``regressions.json``.

``--regression ID`` of a search runs one: exit 0 when it holds, 1 with what is wrong. A row stays when its defect is
repaired; that is what it is for. It is deleted only when the search no longer generates such cases, with the reason in
the commit. ``why`` says which seed it was found with, and the error.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.generated.search.case import Case
from tests.generated.search.sequence import Sequence

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Case)}


def row(found: Case | Sequence, name: str, why: str) -> str:
    """The row of a case or a sequence; only what differs from the defaults."""
    case = found.case if isinstance(found, Sequence) else found
    data: dict[str, Any] = {"id": name, "why": why}
    data["case"] = {key: value for key, value in vars(case).items() if value != _DEFAULTS[key]}
    data["case"]["placement"] = dict(case.placement)
    if isinstance(found, Sequence):
        data["operations"] = [[step.name, dict(step.options)] for step in found.operations]
    return json.dumps(data)


def parsed(data: Mapping[str, Any]) -> Any:
    """The case of a row, or the sequence of one with operations."""
    if "operations" in data:
        return Sequence.from_json(json.dumps({**data, "seed": None}))
    return Case.from_json(json.dumps(data["case"]))


_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
#: Of each search, by their ids.
PLACEMENTS: dict[str, Case] = {data["id"]: parsed(data) for data in _ROWS["placements"]}
SEQUENCES: dict[str, Sequence] = {data["id"]: parsed(data) for data in _ROWS["sequences"]}
REPLAYS: dict[str, Sequence] = {data["id"]: parsed(data) for data in _ROWS["replays"]}
