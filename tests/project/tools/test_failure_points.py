"""docs/FAILURE_POINTS.md: what is by hand stays, the lists are those of the patches."""

from __future__ import annotations

from pathlib import Path

import pytest

import gemma4_compat
from tools.pages import failure_points

TEXT = failure_points.PAGE.read_text(encoding="utf-8")
PATCH = gemma4_compat.patches()[0]


def page_of(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    file = folder / "FAILURE_POINTS.md"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(failure_points, "PAGE", file)
    return failure_points.page()


def test_a_page_is_written_again_as_it_is_and_without_its_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = "\n".join(
        line for line in TEXT.split("\n") if line != failure_points.LIST and not line.startswith("  - [`")
    )
    assert bare != TEXT
    for text in (TEXT, bare, TEXT.replace("](patches/", "](elsewhere/")):
        assert page_of(text, tmp_path, monkeypatch) == TEXT


def test_a_patch_whose_failure_point_has_no_heading_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (point, *_) = PATCH.failure_points
    with pytest.raises(SystemExit, match=f"no heading for {point} of "):
        page_of(TEXT.replace(f"### {point}:", "### F999:"), tmp_path, monkeypatch)


def test_a_heading_that_no_patch_names_has_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = page_of(TEXT + "\n### F999: A lead\n\n- **A repair must show:** x.\n", tmp_path, monkeypatch)
    assert written.endswith("### F999: A lead\n\n- **A repair must show:** x.\n")


def test_a_link_leads_to_the_heading() -> None:
    where = "FAILURE_POINTS.md#f5-shared-keys-and-values-are-lost-between-two-devices"
    assert failure_points.link("F5", "../") == f"[F5](../{where})"
