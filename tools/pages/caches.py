"""What each cache does on Gemma 4, and the table of that in docs/CACHES.md.

``python -m tools.pages.caches`` writes the table; tests/one_device/test_caches.py tries every cell of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "CACHES.md"
START, END = "<!-- caches: start (python -m tools.pages.caches) -->", "<!-- caches: end -->"
YES = "same answers"

#: How a text is generated, and what the table calls it.
WAYS = {
    "plain": "one prompt, batch with padding, beams, a split model",
    "chunks": "`prefill_chunk_size`, text",
    "turn": "a second turn with the returned cache",
    "lookup": "assisted generation, prompt lookup",
    "image": "images, sounds",
}


def _none(config: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Kind:
    """A way to choose a cache.

    Attributes:
        name: what the caller writes.
        options: makes the arguments of ``generate``, given the model's configuration.
        memory: what it holds for how many tokens.
        refused: by way (see :data:`WAYS`) what the table says, and an expression for the error.
    """

    name: str
    memory: str
    options: Callable[[Any], dict[str, Any]] = _none
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def row(self) -> str:
        """Its row of the table."""
        cells = [self.refused[way][0] if way in self.refused else YES for way in WAYS]
        return f"| {self.name} | {self.memory} | {' | '.join(cells)} |"


def _dynamic(config: Any) -> dict[str, Any]:
    from transformers import DynamicCache

    return {"past_key_values": DynamicCache()}


def _dynamic_config(config: Any) -> dict[str, Any]:
    from transformers import DynamicCache

    return {"past_key_values": DynamicCache(config=config)}


def _static(config: Any) -> dict[str, Any]:
    from transformers import StaticCache

    return {"past_key_values": StaticCache(config=config, max_cache_len=64)}


_NO_ROLLBACK = "`ValueError`: not with static caches; since 5.24.0 not with ones longer than the window"
_WINDOW = "full layers: the text; sliding layers: the window"
_ALLOCATED = "the same, allocated for the longest text"

KINDS = (
    Kind("none chosen", _WINDOW),
    Kind("`DynamicCache(config=model.config)`", _WINDOW, _dynamic_config),
    Kind("`DynamicCache()`", "all layers: the text", _dynamic),
    Kind(
        '`cache_implementation="static"`',
        _ALLOCATED,
        lambda config: {"cache_implementation": "static"},
        {"turn": ("`IndexError`: it is as long as the first turn", "index")},
    ),
    Kind(
        "`StaticCache(config=model.config, max_cache_len=...)`",
        _ALLOCATED,
        _static,
        {
            "lookup": (
                _NO_ROLLBACK,
                "assisted generate is not supported with Static cache|a cache that can be cropped",
            )
        },
    ),
    Kind(
        "`use_cache=False`",
        "nothing",
        lambda config: {"use_cache": False},
        {
            "chunks": ("`ValueError`: needs a cache", "Cannot use prefill chunking without a cache"),
            "lookup": (
                "`ValueError` (since 5.24.0 `RuntimeError`): needs a cache",
                "assisted generate requires `use_cache=True`|Assisted decoding requires a cache",
            ),
        },
    ),
)


def table() -> str:
    """The table of docs/CACHES.md."""
    head = f"| cache | what it holds | {' | '.join(WAYS.values())} |"
    return "\n".join([head, "|---" * (len(WAYS) + 2) + "|", *(kind.row for kind in KINDS)])


def page(text: str) -> str:
    """``text`` with the table as it should be."""
    return between(text, START, END, table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
