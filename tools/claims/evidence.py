"""Of the pages on releases, on how it works, and on evidence."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.unit.doctor.explain import pasting
from tools import pasted_errors
from tools.claims.form import Claim, evidence, in_file, result
from tools.pages.markers import ROOT

_EXPLAIN = ROOT / "tests" / "unit" / "doctor" / "explain"
#: Commands of each row of the table in docs/EVIDENCE.md.
EVENING = (
    ("doctor cold", "doctor"),
    ("status", "needed", "list", "env", "explain"),
    ("plan E4B", "plan 26B"),
    ("plan --train",),
    ("scan A B",),
    ("merge",),
)
_TRAINING = "gemma4_compat/patches/training"


def pasted(file: str = "pasted_errors.json") -> tuple[int, int]:
    """Errors that tests of ``explain`` paste, and their stacks."""
    errors = pasted_errors.read(_EXPLAIN / file)
    return len(errors), len({one["stack"] for one in errors})


def spread(values: list[float], digits: int) -> str:
    """The least and the most, or both if they are the same."""
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values))))


def evening(*commands: str) -> tuple[str, ...]:
    """Seconds to the first byte in both stacks, and seconds of CPU in each."""
    walks = [[walk[name] for name in commands if name in walk] for walk in evidence("door.json")["walk"].values()]
    bytes_of = spread([one["first_byte_s"] for walk in walks for one in walk], 1)
    return bytes_of, *(spread([one["user_cpu_s"] for one in walk], int(len(walk) > 2)) for walk in walks)


def screens(when: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = evidence("door.json")["site"][when][kind]
    return found


def site() -> tuple[Any, ...]:
    """Pages, wide ones, sizes of windows, wide tables, and screens."""
    phone, desktop, before = screens("after", "phone"), screens("after", "desktop"), screens("before", "phone")
    return (
        *(phone["pages"], phone["pages_wider_than_the_window"] + desktop["pages_wider_than_the_window"]),
        *map(int, re.findall(r"(\d+) x", evidence("door.json")["site"]["browser"])),
        *(phone["tables_wider_than_the_page"], phone["tables_shown"]),
        *(before["tables_wider_than_the_page"], before["tables_shown"]),
        *(phone["screens_median"], desktop["screens_median"]),
        *(before["screens_median"], screens("before", "desktop")["screens_median"]),
    )


def idle() -> float:
    """Per cent of calls more, of a token in bf16."""
    return float(100 * result("*-cpu-idle/idle_shim-tiny.json")["models"]["plain"]["calls"]["token"]["more"])


CLAIMS = (
    Claim(
        "docs/RELEASES.md",
        "were measured with {}, GPU figures with {}.",
        lambda: (
            evidence("show/newest.json")["versions"]["torch"].partition("+")[0],
            result("*-h100-depth/depth-E2B.json")["machine"]["versions"]["torch"],
        ),
    ),
    Claim(
        "docs/RELEASES.md",
        "{} or newer; fused kernels need {}.",
        lambda: (
            *in_file("pyproject.toml", r'"torch>=([\d.]+)"'),
            *in_file("gemma4_compat/_kernels/compiling.py", r"Needs torch ([\d.]+) or newer"),
        ),
    ),
    Claim(
        "docs/RELEASES.md",
        "code of torch itself: , as it is in {} to {}, and , as it is in {} to {}.",
        lambda: (
            *in_file(f"{_TRAINING}/bitsandbytes_fsdp_packed_weights.py", r"torch ([\d.]+) to 2.11"),
            *in_file(f"{_TRAINING}/bitsandbytes_fsdp_packed_weights.py", r"torch 2.12 to ([\d.]+)"),
            *in_file(f"{_TRAINING}/accelerate_ddp_offloaded.py", r'"torch ([\d.]+)",\n    \}'),
            *in_file(f"{_TRAINING}/accelerate_ddp_offloaded.py", r'"torch ([\d.]+)"'),
        ),
    ),
    Claim("docs/HOW_IT_WORKS.md", "of a bf16 model on one device takes {:.1f} % more calls", lambda: (idle(),)),
    Claim(
        "docs/EVIDENCE.md",
        "It was made with {} errors of {} stacks, which it all finds first, pasted in {} ways.",
        lambda: (*pasted(), len(pasting.STYLES)),
    ),
    Claim(
        "docs/EVIDENCE.md",
        "{} tracebacks of {} other stacks, whole and cut short, and {} texts",
        lambda: (
            *pasted("other_stacks.json"),
            len(json.loads((_EXPLAIN / "public_errors.json").read_text(encoding="utf-8"))),
        ),
    ),
    *(
        Claim("docs/EVIDENCE.md", "| {} s | {} s | {} s |", lambda commands=commands: evening(*commands))
        for commands in EVENING
    ),
    Claim(
        "docs/EVIDENCE.md",
        "Chromium, {} pages: {} wider than the window, on a phone ({} pixels) and a desktop ({:,}). On the phone {} "
        "of {} tables are wider than their page; {} of {} were. The median page has {} screens on the phone and {} on "
        "the desktop ({} and {} before).",
        site,
    ),
)

CONSTANTS: dict[str, tuple[str, ...]] = {
    "docs/RELEASES.md": ("exits with 2", "(exit 1)", "(exit 0)", "exits 1 when no patch"),
    "docs/HOW_IT_WORKS.md": (),
    "docs/ERRORS.md": (),
    "docs/BENCHMARKS.md": ("at 64 tokens", "half of the layers"),
    "docs/EVIDENCE.md": (
        *("a GPU with 24 GiB", "a budget of 2 GiB", "noise of some per cent", "for a toy of 6 layers"),
        # What `explain` answers: tests/unit/doctor/explain/test_common_errors.py computes the figures.
        *("65 texts of public", "39 texts were", "| 26, known", "| 2 | | 26", "| 14 others", "| 0 | 7", "| 7 | 14"),
        *("| 15 others", "| 2 | 9", "| 9 | 15", "| 10 others", "| 2 | 5", "| 5 | 9"),
    ),
}
