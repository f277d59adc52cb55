"""What pages say in numbers, outside their generated parts: computed from results, or from what the code says.

python -m tools.claims    how many numbers each page has, and how many of them are computed or constants

A claim is a part of a sentence with ``{}`` where a number stands, and what computes it. A constant is a number that
nobody measures: an exit code, a size that an option takes, what others have published. A page with either is
read.
"""

from __future__ import annotations

from tools.claims import benchmarks, decoding, evidence, numerics, running, storing, training
from tools.claims.form import NAMES, NUMBER, prose

_PARTS = (running, storing, training, evidence, benchmarks, decoding, numerics)
CLAIMS = tuple(claim for part in _PARTS for claim in part.CLAIMS)
CONSTANTS = {page: words for part in _PARTS for page, words in part.CONSTANTS.items()}
#: The pages that are read.
PAGES = tuple(dict.fromkeys([*CONSTANTS, *(claim.page for claim in CLAIMS)]))


def numbers(page: str) -> list[str]:
    """The numbers of a page that no claim computes, with the words around them."""
    text = prose(page)
    for claim in CLAIMS:
        if claim.page == page:
            text = text.replace(claim.said, "")
    text = NAMES.sub("", text)
    return [text[max(0, found.start() - 30) : found.end() + 30] for found in NUMBER.finditer(text)]


def unexplained(page: str) -> list[str]:
    """Those of :func:`numbers` that are no constants either."""
    return [found for found in numbers(page) if not any(constant in found for constant in CONSTANTS.get(page, ()))]


def counted(page: str) -> tuple[int, int, int]:
    """How many numbers are computed, constants, and neither."""
    left, bare = len(numbers(page)), len(unexplained(page))
    computed = sum(len(NUMBER.findall(NAMES.sub("", claim.said))) for claim in CLAIMS if claim.page == page)
    return computed, left - bare, bare
