"""How many lines a room has is agreed: ``python -m tools.lines``, which CI runs with lint."""

from __future__ import annotations

from tools import lines


def test_more_than_three_per_cent_is_above() -> None:
    agreed = {"gemma4_compat/_big": 10_000, "gemma4_compat/_small": 100}
    for today, wrong in (
        ({"gemma4_compat/_big": 10_300, "gemma4_compat/_small": 140}, []),
        ({"gemma4_compat/_big": 10_301, "gemma4_compat/_small": 60}, ["gemma4_compat/_big"]),
        ({"gemma4_compat/_small": 141, "gemma4_compat/_new": 41}, ["gemma4_compat/_new", "gemma4_compat/_small"]),
    ):
        rows, above = lines.table(today, agreed)
        assert [line.partition(":")[0] for line in above] == wrong
        assert len(rows) == len({*today, *agreed})
