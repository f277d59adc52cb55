"""``releases``: what the package index holds."""

from __future__ import annotations

import argparse
import json
import re
import sys

from packaging.version import Version

from gemma4_compat._engine import versions
from tools.matrix import environments, stacks
from tools.matrix.stacks import LIBRARIES


def releases(library: str) -> list[str]:
    """The releases of a library that pip's index has, from the supported floor up, oldest first."""
    wrote = environments.checked([sys.executable, "-m", "pip", "index", "versions", library])
    listed = re.search(r"Available versions: (.*)", wrote)
    assert listed, wrote
    found = sorted(map(Version, listed.group(1).split(", ")))
    return [str(item) for item in found if item >= Version(versions.OLDEST[library])]


def print_releases(options: argparse.Namespace) -> int:
    """A line for each library, as matrix.toml has it."""
    written = stacks.releases()
    for library in LIBRARIES:
        found = releases(library)
        fresh = [release for release in found if release not in written.get(library, ())]
        print(f"{library} = {json.dumps(found)}" + (f"  # new: {', '.join(fresh)}" if fresh else ""))
    return 0
