"""Generate docs/PATCHES.md, docs/VARIANTS.md and the marked parts of README.md and other pages from registry and
measurements.

python tools/docs.py            write them
python tools/docs.py --check    exit 1 when they are stale (a test does this)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ["GEMMA4_COMPAT_DISABLE"] = "all"

import compare_report  # noqa: E402
import small_card_report  # noqa: E402

from tools import variants  # noqa: E402
from tools.pages import (  # noqa: E402
    clients,
    fuzzing,
    gpu,
    interpreters,
    matrix,
    measurements,
    patches,
    quantization,
    threads,
)
from tools.pages.markers import filled  # noqa: E402


def benchmarks_page() -> str:
    """docs/BENCHMARKS.md with its tables."""
    page = (ROOT / "docs" / "BENCHMARKS.md").read_text(encoding="utf-8")
    for benchmark in compare_report.TABLES:
        page = filled(page, benchmark.replace("_", " "), compare_report.section(benchmark))
    return page


def main() -> int:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, content in (
        ("patches", patches.table()),
        ("gpu", gpu.readme_section()),
        ("search", measurements.search_section()),
        ("matrix", matrix.readme_section()),
        ("upstream", measurements.upstream_section()),
        ("import time", measurements.import_section()),
        ("merge", measurements.merge_section()),
        ("what it costs", compare_report.summary()),
        *([("small card", small_card_report.section())] if small_card_report.committed() else []),
    ):
        readme = filled(readme, name, content)
    wanted = {ROOT / "README.md": readme, ROOT / "docs" / "PATCHES.md": patches.patches_page()}
    wanted[ROOT / "docs" / "QUANTIZATION.md"] = quantization.page()
    wanted[ROOT / "docs" / "GPU.md"] = gpu.page()
    wanted[ROOT / "docs" / "VARIANTS.md"] = variants.page()
    wanted[ROOT / "docs" / "CLIENTS.md"] = clients.page()
    wanted[ROOT / "docs" / "FUZZING.md"] = fuzzing.page()
    wanted[ROOT / "docs" / "THREADS.md"] = threads.page()
    if interpreters.FILE.exists():
        wanted[ROOT / "docs" / "INTERPRETERS.md"] = interpreters.page()
    wanted[ROOT / "docs" / "BENCHMARKS.md"] = benchmarks_page()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    pictures = {path: "small_card_report" for path in small_card_report.stale()}
    pictures |= {path: "compare_report" for path in compare_report.stale()}
    for path, script in pictures.items():  # drawing them needs matplotlib, which this script does without
        print(f"{path.relative_to(ROOT)} is stale; run python benchmarks/{script}.py", file=sys.stderr)
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run python tools/docs.py", file=sys.stderr)
        return 1 if stale or pictures else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
