"""Of the page on how fast decoding was."""

from __future__ import annotations

import math
import re
from typing import Any

from tools.claims.form import Claim, in_file, result
from tools.claims.running import searched
from tools.pages.markers import ROOT

_PAGE = "docs/DECODING_MEASURED.md"


def counted(prompt: str) -> tuple[str, ...]:
    """Calls and operations of a prompt: without a replay, replayed, and in pieces, where that was counted."""
    text = (ROOT / "docs" / "evidence" / "prompt_calls.txt").read_text(encoding="utf-8")
    way = "(?:without replay|replayed|in pieces)"
    rows = re.findall(rf"^ +{prompt} *{way}: ([\d,]+) calls, ([\d,]+)", text, re.MULTILINE)
    return tuple(number for row in rows for number in row)


def kernel() -> tuple[float, ...]:
    """Tera-operations a second of attention with wide heads and many keys, and its share of the time of PyTorch's."""
    rows = [row for row in result("*-h100-flash/attention.json")["times"] if row["D"] == 512 and row["held"] >= 32_768]
    shares, speeds = [row["us"] / row["sdpa_us"] for row in rows if "sdpa_us" in row], [row["tflops"] for row in rows]
    return min(speeds), max(speeds), min(shares), max(shares)


def of_a_step() -> tuple[float, float]:
    """Milliseconds on the GPU and in all, without drafts."""
    found = result("*-h100/rounds-E2B.json")["cases"]["E2B gpu no"]["ms"]["0"]
    return found["graphs"]["reads 1"], found["round"]


def paces() -> tuple[Any, ...]:
    """Tokens of a text; at least how many times as fast the first, the next, and one after another kind are."""
    (bounds,) = in_file("tests/unit/generation/test_drafts.py", r'"least_of_best"\), \[(.*)\]\n')
    found = []
    for tokens, least in re.findall(r"\((\d+), ([\d.]+),", bounds):
        after = float(least) - (64 / int(tokens)) * 0.07  # to 0.005 below
        found += [int(tokens), least, least, f"{math.floor(200 * after + 1e-9) / 200:g}"]
    return tuple(found)


def drawn() -> tuple[str, ...]:
    """Of the drafts of an assistant, by its noise: accepted in per cent at two temperatures, drawn and likeliest."""
    text = (ROOT / "docs" / "evidence" / "sampled_drafts.txt").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\d.]+) \| [\d.]+ \| (\d+)% \| (\d+)% \|", text, re.MULTILINE)
    return tuple(share for low, high in zip(rows[::2], rows[1::2]) for share in (*low[1:], *high[1:]))


CLAIMS = (
    Claim(
        _PAGE,
        "64 tokens | {} calls of functions, {} operations of PyTorch | {} and {} | {} and {} |",
        lambda: counted("64 tokens"),
    ),
    Claim(_PAGE, "4,096 tokens, | {} and {} | {} and {} | {} and {} |", lambda: counted("4096 tokens(?: {.*?})?")),
    Claim(_PAGE, "of them of an image | {} and {} | {} and {} | - |", lambda: counted("64 tokens {'images': 1}")),
    Claim(
        _PAGE,
        "computes {:.0f} to {:.0f} TFLOP/s with heads of 512 from 32,768 keys on, in {:.2f} to {:.2f} of the time",
        kernel,
    ),
    Claim(_PAGE, "takes {:.2f} ms on the GPU and {:.2f} ms in all", of_a_step),
    Claim(
        _PAGE,
        "| {} | {} | {} | {} | | {} | {} | {} | {} | | {:,} | {} | {} | {} |",
        paces,
    ),
    Claim(
        _PAGE,
        "| nothing | {}% | {}% | {}% | {}% | | noise of 0.5 | {}% | {}% | {}% | {}% | | noise of 1.0 | {}% | {}% | "
        "{}% | {}% | | noise of 2.0 | {}% | {}% | {}% | {}% |",
        drawn,
    ),
    Claim(
        _PAGE,
        "the tests try {}.",
        lambda: (searched("replay_search"),),
    ),
)

CONSTANTS: dict[str, tuple[str, ...]] = {
    _PAGE: (
        "so 64 tokens take",
        "as long as 2,048",
        "for 64 and",
        "and 512 tokens",
        "64 tokens, four",
        "with the times of",
        "up to 20 host events",
        "fusing 512 tokens",
        "chunks of 512",
        "and 2,048",
        "A text of 131,072",
        "The third text",
        "first prompt of 2,048",
        "turns of 40",
        "texts of 256 tokens",
        "deviation of 3",
        "2,000 tokens",
        "temperature 0.5",
        "temperature 1.0",
        "made twice on the same",
        "(seeds 147",
        "and 395",
        "At once, 147",
        "(397)",
        "(230)",
        "(4230",
        "920070)",
        "(910148)",
        "(633",
        "and 633 passes",
    ),
}
