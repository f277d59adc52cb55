"""What pages say in numbers is what was measured, or what the code does."""

from __future__ import annotations

import pytest

from gemma4_compat._engine import versions
from tools import claims
from tools.claims.form import Claim
from tools.pages import contexts, fits


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: f"{claim.page}: {claim.text:.40}")
def test_pages_say_what_is_computed(claim: Claim) -> None:
    assert claim.page in claims.PAGES
    assert claim.said in claims.prose(claim.page)


@pytest.mark.parametrize("page", claims.PAGES)
def test_every_number_is_computed_or_a_constant(page: str) -> None:
    assert claims.unexplained(page) == []
    found = claims.numbers(page)
    unused = [constant for constant in claims.CONSTANTS.get(page, ()) if not any(constant in text for text in found)]
    assert unused == []


def test_numbers_are_seen() -> None:
    text = "transformers 5.13 on an H200 with E2B, 4-bit: 3.5 GiB, a quarter, twice, 16,384 tokens, ten times"
    assert [found[0] for found in claims.NUMBER.finditer(claims.NAMES.sub("", text))] == [
        *("3.5", "quarter", "twice", "16,384", "times"),
    ]


@pytest.mark.full
def test_the_table_of_cards_is_what_the_planner_says() -> None:
    if versions.installed("transformers") != contexts.RELEASE:
        pytest.skip(f"the page is for transformers {contexts.RELEASE}")
    text = fits.PAGE.read_text(encoding="utf-8")
    assert fits.page(text) == text, "python -m tools.pages.fits"
