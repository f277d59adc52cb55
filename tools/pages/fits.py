"""What fits which card, in docs/SMALL_CARD.md: plans for cards of several sizes, by the planner's arithmetic for the
installed transformers.

python -m tools.pages.fits    write the table
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import gemma4_compat
from gemma4_compat import Plan
from gemma4_compat._gemma4.models import variants
from gemma4_compat._plan import speed
from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "SMALL_CARD.md"
START, END = "<!-- fits: start (python -m tools.pages.fits) -->", "<!-- fits: end -->"
#: A card of each size; of the smallest none has figures, so a plan is for what ``--card`` leaves of it.
CARDS = ("4 GB", "6 GB", "RTX 4060", "RTX 3060", "RTX 4080", "RTX 3090")
CONTEXT = 8192
_TOWERS = ("vision_tower", "audio_tower")


def plan(variant: str, card: str) -> Plan:
    """For a prompt and an answer of 8,192 tokens, in 4 bits, without an adapter."""
    if card in speed.CARDS:
        return gemma4_compat.plan_device_map(variant, card=card, context=CONTEXT)
    return gemma4_compat.plan_device_map(variant, f"{int(card.removesuffix(' GB')) - 1}GiB", context=CONTEXT)


def away(found: Plan) -> str:
    """What is in host memory."""
    names = [name for name, device in found.device_map.items() if device == "cpu"]
    layers = {name for name in names if re.search(r"\.layers\.\d+$", name)}
    experts = {name for name in names if name.endswith(".experts")}
    total = len({int(index) for name in found.device_map for index in re.findall(r"\.layers\.(\d+)", name)})
    parts = (
        ("table", any("per_layer" in name for name in names)),
        ("head", "lm_head" in names),
        ("towers", any(name.endswith(_TOWERS) for name in names)),
        (f"experts of {len(experts)} of {total} layers", experts),
        (f"{len(layers)} of {total} layers", layers),
    )
    said = [text for text, there in parts if there]
    assert bool(said) == bool(names), names
    return ", ".join(said) or "nothing"


def table() -> str:
    """A row for each card."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    yield f"| card | {' | '.join(variants.NAMES)} |"
    yield f"|---{'|---' * len(variants.NAMES)}|"
    for card in CARDS:
        size = f"{speed.CARDS[card].gib} GB ({card})" if card in speed.CARDS else card
        yield f"| {size} | {' | '.join(_cell(variant, card) for variant in variants.NAMES)} |"


def _cell(variant: str, card: str) -> str:
    try:
        found = plan(variant, card)
    except gemma4_compat.Gemma4CompatError:
        return "does not fit"
    rate = found.modelled.get(card)
    return away(found) + (f" (~{rate:.0f})" if rate else "")


def on_page() -> dict[int, list[str]]:
    """GB of a card in the table, smallest first, and the models that it holds as a whole."""
    _, part = PAGE.read_text(encoding="utf-8").split(START)
    rows = [line.strip("| ").split(" | ") for line in part.partition(END)[0].splitlines() if line.startswith("| ")]
    return {
        int(size.split()[0]): [name for name, cell in zip(rows[0][1:], cells) if cell.startswith("nothing")]
        for size, *cells in rows[1:]
    }


def whole() -> tuple[int, tuple[str, ...], int]:
    """GB of the smallest card that holds three models as a whole, these, and GB of the smallest that holds all."""
    held = on_page()
    three = min(size for size, names in held.items() if len(names) == 3)
    return three, tuple(held[three]), min(size for size, names in held.items() if len(names) == len(variants.NAMES))


def page(text: str) -> str:
    """``text`` with the table as it should be."""
    return between(text, START, END, f"\n{table()}\n")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
