"""The address of this package, in this place only. The build reads it as well (hatch_build.py)."""

from __future__ import annotations

#: Address of the repository, without a final slash. None: it has no address yet, and neither messages nor the
#: package's metadata name one.
REPOSITORY: str | None = None


def report_request() -> str:
    """Where to report something, as the end of a sentence that begins with "please"."""
    return f"report it at {REPOSITORY}/issues" if REPOSITORY else "report it to the maintainers of gemma4_compat"
