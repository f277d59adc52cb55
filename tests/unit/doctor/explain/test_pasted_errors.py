"""``explain`` answers errors as people paste them: what reproductions raised in measured stacks, whole and shortened.

``pasted_errors.json`` is what ``tools/pasted_errors.py`` collected; ``pasting.py`` writes each in twelve ways.
"""

from __future__ import annotations

import collections
import itertools
import json
import re
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._doctor.explain import messages, search
from tests.collecting import collect_failures
from tests.unit.doctor.explain import pasting
from tools import pasted_errors

ERRORS = pasted_errors.read()
PATCHES = gemma4_compat.patches()
#: The same text in the same place from two patches: what the user's device map is decides.
EITHER = {"transformers-map-boundaries": {"accelerate-nested-map"}}
#: Ways that leave out where it was raised.
BARE = ("last_line", "first_line")
#: What a bare text begins with tells as much as all of it; letters only, because numbers and names vary.
_BEGINS = 24


def begins(error: str) -> str:
    return re.sub(r"[^a-z]", "", error.partition(": ")[2].lower())[:_BEGINS]


def key(one: dict[str, Any]) -> tuple[str, str | None]:
    return begins(one["error"]), pasted_errors.place(one)


BY_PLACE, BY_TEXT = collections.defaultdict(set), collections.defaultdict(set)
for _one in ERRORS:
    BY_PLACE[key(_one)].add(_one["patch"])
    BY_TEXT[begins(_one["error"])].add(_one["patch"])


def right(one: dict[str, Any], style: str) -> set[str]:
    """The patches that may come first: the one that repairs it, and those with the same text in the same place."""
    if style not in BARE:
        return BY_PLACE[key(one)] | EITHER.get(one["patch"], set())
    text = begins(one["error"])
    quoting = {patch.id for patch in PATCHES if text and text in re.sub(r"[^a-z]", "", patch.symptom.lower())}
    return BY_TEXT[text] | quoting | EITHER.get(one["patch"], set())


def first(text: str) -> str | None:
    matches = search.search(messages.read(text), PATCHES).matches
    return matches[0].patch.id if matches else None


#: Each error whole as Python prints it, its last line, and one of the other ways in turn.
_OTHERS = itertools.cycle(style for style in pasting.STYLES if style not in ("whole", "last_line"))
CASES = {
    f"{number}-{one['patch']}-{style}": (one, style)
    for number, one in enumerate(ERRORS)
    for style in ("whole", "last_line", next(_OTHERS))
}


def test_there_are_sixty_different_errors_of_several_stacks() -> None:
    assert len(ERRORS) >= 60
    assert len({one["stack"] for one in ERRORS}) >= 5
    assert {style for _, style in CASES.values()} == set(pasting.STYLES)
    for one in ERRORS:
        assert not re.search(r"/(?:tmp|root|work)/", repr(one)), one["patch"]


@collect_failures(case=CASES)
def test_the_first_answer_is_right(case: str) -> None:
    one, style = CASES[case]
    assert first(pasting.STYLES[style](one)) in right(one, style)


@pytest.mark.full
@collect_failures(case=[f"{number}-{style}" for number in range(len(ERRORS)) for style in pasting.STYLES])
def test_the_first_answer_is_right_in_every_way_of_pasting(case: str) -> None:
    number, _, style = case.partition("-")
    one = ERRORS[int(number)]
    assert first(pasting.STYLES[style](one)) in right(one, style)


def test_a_text_that_begins_alike_is_no_free_pass() -> None:
    """The sets are small: of a whole traceback few patches are right, of a bare text those that raise it."""
    sizes = [len(right(one, "whole")) for one in ERRORS]
    assert sum(size == 1 for size in sizes) > 0.75 * len(sizes)
    assert max(sizes) <= 4
    assert max(len(right(one, "last_line")) for one in ERRORS) < len(PATCHES) / 8


def test_the_places_are_those_of_the_errors() -> None:
    assert json.loads(pasted_errors.places(ERRORS)) == search.PLACES


@pytest.mark.parametrize(
    "text",
    [
        "/home/me/x.py:12\nKeyError: 'sliding_attention'",
        "> > KeyError: 'sliding_attention'",
        "2026-11-26 14:22:52,123 ERROR KeyError: 'sliding_attention'",
        "│ KeyError: 'sliding_attention' │",
        "trainer-1  | KeyError: 'sliding_attention'",
        f"{'x' * 80}\n{'y' * 80}\nz\nKeyError: 'sliding_attention'",
    ],
)
def test_what_is_around_an_error_is_left_out(text: str) -> None:
    assert first(text) in ("transformers-shared-kv", "accelerate-skip-keys")
