"""Generate docs/PATCHES.md, docs/patches and other pages, the lists of docs/FAILURE_POINTS.md, the marked parts of
README.md and other pages, and the errors in gemma4_compat/patches/measured.json from registry and measurements.

python tools/docs.py            write them
python tools/docs.py --check    exit 1 when they are stale (a test does this)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["GEMMA4_COMPAT_DISABLE"] = "all"

from benchmarks.reporting import compare_report, questions  # noqa: E402
from benchmarks.small_card import report as small_card_report  # noqa: E402
from tools import fingerprints, relatives, variants  # noqa: E402
from tools.pages import (  # noqa: E402
    beside,
    cards,
    checks,
    clients,
    decoding,
    errors,
    failure_points,
    float16,
    fuzzing,
    gives,
    gpu,
    interpreters,
    matrix,
    measurements,
    patches,
    quantization,
    raised,
    serving,
    threads,
    trained,
    upstream_limits,
)
from tools.pages.markers import filled, from_docs  # noqa: E402

#: Page -> its generated parts. What is written for the README names files from the root of the repository.
PARTS: dict[str, list[tuple[str, Callable[[], str]]]] = {
    "README.md": [("common errors", errors.common), ("what it gives", gives.section)],
    "docs/ERRORS.md": [("common errors", errors.common)],
    "docs/SMALL_CARD.md": [("small card", small_card_report.section)],
    "docs/MERGING.md": [("merge", measurements.merge_section), ("checkpoints", measurements.checkpoints_section)],
    "docs/RELEASES.md": [("upstream", measurements.upstream_section)],
    "docs/HOW_IT_WORKS.md": [("import time", measurements.import_section)],
    "docs/PLACEMENT.md": [("search", measurements.search_section)],
    "docs/CARDS.md": [("cards", cards.section)],
    "docs/SERVING.md": [("speed", serving.section)],
    "docs/TRAINERS.md": [("beside", beside.section)],
    "docs/RELATIVES.md": list(relatives.SECTIONS.items()),
    "docs/CHECK.md": [("checks", checks.section)],
    "docs/TRAINED_MODEL.md": [
        ("learned", trained.learned),
        ("drafts", trained.drafts),
        ("compared", trained.compared),
        ("shown", trained.shown),
        ("elsewhere", trained.elsewhere),
        ("media", trained.media),
        ("on a gpu", trained.on_gpu),
    ],
    "docs/DECODING_MEASURED.md": [
        ("replays", measurements.replays_section),
        ("prompts", decoding.prompts),
        ("fused prompts", decoding.fused),
        ("attention", decoding.attention),
        ("contexts", decoding.contexts),
        ("turns", decoding.turns),
        ("rounds", decoding.rounds),
        ("drafted", decoding.drafted),
    ],
    "docs/EVIDENCE.md": [
        ("the matrix", lambda: matrix.section([*gpu.counts(), *variants.summary()])),
        ("gpu", gpu.summary),
        ("what it costs", compare_report.summary),
        ("commands", measurements.commands_section),
        ("measured when", compare_report.measured_when),
    ],
}

#: Pages whose parts have links that are right where they stand.
AS_WRITTEN = ("README.md",)


def with_parts(page: str) -> str:
    """The page with its generated parts as they should be."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, content in PARTS[page]:
        text = filled(text, name, content() if page in AS_WRITTEN else from_docs(content()))
    return text


def main() -> int:
    wanted = {ROOT / page: with_parts(page) for page in PARTS}
    wanted[ROOT / "docs" / "PATCHES.md"] = patches.index()
    wanted |= {ROOT / "docs" / "patches" / name: text for name, text in patches.pages().items()}
    wanted[failure_points.PAGE] = failure_points.page()
    known = fingerprints.known(), fingerprints.patches(), raised.errors()
    wanted[fingerprints.DATA] = fingerprints.text(*known)
    wanted[ROOT / "docs" / "QUANTIZATION.md"] = quantization.page()
    training = (ROOT / "docs" / "TRAINING.md").read_text(encoding="utf-8")
    training = filled(training, "mlp pieces", measurements.mlp_pieces_section())
    training = filled(training, "long steps", measurements.long_steps_section())
    training = filled(training, "short steps", measurements.short_steps_section())
    training = filled(training, "grpo steps", measurements.grpo_steps_section())
    wanted[ROOT / "docs" / "TRAINING.md"] = filled(training, "chunked loss", measurements.chunked_loss_section())
    halves = float16.PAGE.read_text(encoding="utf-8")
    for name, content in float16.parts().items():
        halves = filled(halves, name, content)
    wanted[float16.PAGE] = halves
    wanted[ROOT / "docs" / "GPU.md"] = gpu.page()
    wanted[ROOT / "docs" / "VARIANTS.md"] = variants.page()
    wanted[ROOT / "docs" / "CLIENTS.md"] = clients.page()
    wanted[ROOT / "docs" / "FUZZING.md"] = fuzzing.page()
    wanted[ROOT / "docs" / "THREADS.md"] = threads.page()
    if upstream_limits.runs():
        wanted[ROOT / "docs" / "UPSTREAM_LIMITS.md"] = upstream_limits.page()
    if interpreters.FILE.exists():
        wanted[ROOT / "docs" / "INTERPRETERS.md"] = interpreters.page()
    for page, content in questions.pages().items():
        wanted[page] = filled(page.read_text(encoding="utf-8"), page.stem.replace("_", " "), content)
    wanted |= small_card_report.pictures() | questions.pictures() | gives.pictures()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run python tools/docs.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
