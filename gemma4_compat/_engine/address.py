"""Where this package lives: the one place that says so. The build reads it, too (hatch_build.py)."""

from __future__ import annotations

#: Address of the repository, without a slash at its end. None until there is one: then neither a message nor the
#: package's metadata names an address.
REPOSITORY: str | None = None


def report_request() -> str:
    """Whom to tell of something, as the end of a sentence that begins with "please"."""
    return f"report it at {REPOSITORY}/issues" if REPOSITORY else "report it to the maintainers of gemma4_compat"
