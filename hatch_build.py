"""What the build adds to pyproject.toml: addresses, and the README as an index page shows it.

The address is that of ``gemma4_compat/_engine/io/address.py``. An index page knows no files beside the README, so
links to these are made absolute, or, as long as there is no address, into plain text.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    """Hatchling's hook for the fields that pyproject.toml calls dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in ``readme`` and ``urls``."""
        root = Path(self.root)
        repository = runpy.run_path(str(root / "gemma4_compat" / "_engine" / "io" / "address.py"))["REPOSITORY"]
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_an_index(text, repository)}
        metadata["urls"] = urls(repository)


def urls(repository: str | None) -> dict[str, str]:
    """The addresses of a project, by their names on an index page."""
    if repository is None:
        return {}
    return {
        "Repository": repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Documentation": f"{repository}/blob/main/docs/index.md",
    }


def for_an_index(text: str, repository: str | None) -> str:
    """``text`` with links to files of the repository made absolute, or into plain text where it has no address.

    Without an address, there are no pictures.
    """
    text = re.sub(r"<!--.*?-->\n?", "", text)
    picture = "" if repository is None else rf"![\1]({repository}/raw/main/\2)"
    text = re.sub(r"!\[([^\]]+)\]\((?![a-z]+:)([^)]+)\)", picture, text)
    replacement = r"\1" if repository is None else rf"[\1]({repository}/blob/main/\2)"
    return re.sub(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)", replacement, text)
