"""Print the changelog's section of a release, for the release's page.

python tools/release_notes.py 0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notes(changelog: str, version: str) -> str:
    """What stands under ``## [version]``, without the heading.

    Raises:
        SystemExit: there is no such section, or nothing in it.
    """
    found = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    text = found.group(1).strip() if found else ""
    if not text:
        raise SystemExit(f"CHANGELOG.md has nothing for {version}; its heading is: ## [{version}] - YEAR-MONTH-DAY")
    return text


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    print(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
