"""``explain`` on errors that its patterns were not made from.

``other_stacks.json``: what reproductions raised in nine stacks of which pasted_errors.json has nothing.
``public_errors.json``: what people pasted into a forum and into trackers on GitHub, cut short as they did,
and messages of libraries; those with ``advice`` are common errors, those with ``none`` no error of a patch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gemma4_compat._doctor.explain import messages, search
from tests.collecting import collect_failures
from tests.helpers import ROOT
from tests.unit.doctor.explain import pasting
from tests.unit.doctor.explain.test_pasted_errors import ERRORS, PATCHES, first, right
from tools import pasted_errors

HERE = Path(__file__).parent
OTHERS = pasted_errors.read(HERE / "other_stacks.json")
PUBLIC: list[dict[str, Any]] = json.loads((HERE / "public_errors.json").read_text(encoding="utf-8"))
WHOLE = [style for style in pasting.STYLES if style not in ("first_line", "last_line")]
CASES = {
    f"{number}-{one['patch']}-{style}": (one, style)
    for number, one in enumerate(OTHERS)
    for style in (WHOLE[number % len(WHOLE)], "last_line")
}


def test_the_stacks_are_others() -> None:
    assert len(OTHERS) >= 50
    assert len(OTHERS) + len(PUBLIC) >= 60
    assert not {one["stack"] for one in OTHERS} & {one["stack"] for one in ERRORS}


@collect_failures(case=CASES)
def test_the_first_answer_is_right_in_other_stacks(case: str) -> None:
    one, style = CASES[case]
    assert first(pasting.STYLES[style](one)) in right(one, style) | {one["patch"]}


@collect_failures(number=range(len(PUBLIC)))
def test_the_first_answer_is_right_for_what_people_pasted(number: int) -> None:
    one = PUBLIC[number]
    said = messages.read("\n".join(one["text"]))
    found = search.answer(said, PATCHES)
    matches, advice = found.matches, found.advice
    told = matches[0].patch.id if matches else advice.what + advice.to_do if advice else ""
    wanted = one.get("patches") or [one.get("advice", "")]
    if one.get("none"):
        assert (told, matches) == ("", ()), one["from"]
    elif "patches" in one:
        assert told in wanted, one["from"]
    else:
        assert wanted[0] in told, one["from"]
        assert not matches


def test_the_page_says_how_many() -> None:
    page = " ".join((ROOT / "docs" / "EVIDENCE.md").read_text(encoding="utf-8").split())
    stacks = len({one["stack"] for one in OTHERS})
    (said,) = re.findall(r"(\d+) tracebacks of (\d+) other stacks, whole and cut short, and (\d+) texts", page)
    assert tuple(map(int, said)) == (len(OTHERS), stacks, len(PUBLIC))
