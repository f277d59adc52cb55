"""tools/readers.py: its page is that of its data, and what is written here is read wherever a released model is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemma4_compat._gemma4.models import variants
from tools import readers

DATA = json.loads(readers.DATA.read_text(encoding="utf-8"))
CELLS = {(cell["reader"], cell["variant"], cell["writer"]): cell for cell in DATA["cells"]}
OURS = ("patched", "repair", "merge", "qlora")


def equal(cell: dict[str, Any]) -> bool:
    return "difference" not in cell or cell["difference"] <= DATA["bound"] * cell["own"]


def test_the_page_is_that_of_the_data() -> None:
    assert readers.PAGE.read_text(encoding="utf-8") == readers.page()


def test_every_cell_was_tried() -> None:
    assert set(CELLS) == {
        (reader, variant, writer)
        for reader in DATA["readers"]
        for variant in variants.NAMES
        for writer in readers.WRITERS
    }
    assert len(CELLS) == len(DATA["cells"])


@pytest.mark.parametrize("writer", OURS)
def test_a_reader_of_released_checkpoints_reads_those_written_here(writer: str) -> None:
    for reader in DATA["readers"]:
        for variant in variants.NAMES:
            released, written = (CELLS[reader, variant, name] for name in ("released", writer))
            assert (written["error"] is None) == (released["error"] is None), (reader, variant)
            assert equal(written) or not equal(released)


def test_without_this_package_some_of_them_are_refused() -> None:
    refused = {
        cell["reader"] for cell in DATA["cells"] if cell["writer"] in ("transformers", "before") and cell["error"]
    }
    assert refused == set(DATA["readers"])


def test_a_table_says_what_was_found() -> None:
    cells = [
        {"variant": "E2B", "writer": writer, "reader": "mlx-lm 1", "error": None, "difference": 1e-6, "own": 1e-6}
        for writer in readers.WRITERS
    ]
    cells[1] |= {"error": "ValueError: Missing 6 parameters"}
    cells[2] |= {"difference": 1.0}
    del cells[3]["difference"]
    text = readers.tables({"readers": ["mlx-lm 1"], "cells": cells})
    rows = [line.split(" | ")[1].rstrip(" |") for line in text.splitlines() if line.startswith("| ")][1:]
    assert rows[:4] == ["yes, 1e-06 (1e-06)", "no [1]", "**other outputs**, 1.0e+00", "yes"]
    assert text.endswith("1. `ValueError: Missing 6 parameters`\n")
