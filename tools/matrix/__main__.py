"""The command line, see :mod:`tools.matrix`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tools.matrix
from tools.evidence import EVIDENCE
from tools.matrix import UsageError, bisection, canary, index, run
from tools.matrix.beside import command as beside
from tools.matrix.stacks import LIBRARIES, ROOT


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.matrix", description=(tools.matrix.__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--work", type=Path, default=ROOT / ".nox" / "cells", help="where environments are built")
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("run", help="patch tests in stacks")
    command.add_argument("stacks", nargs="*", metavar="STACK", help="default: all of them")
    command.add_argument("--ci", action="store_true", help="only CI's stacks, and there the patches that have a gate")
    command.add_argument(
        "--patches",
        nargs="+",
        default=[],
        metavar="PATCH",
        help="only these; what a stack's result says about the others stays",
    )
    command.add_argument(
        "--reproductions",
        action="store_true",
        help="without the patch, with it, undone; none of the patch's other tests",
    )
    command.add_argument("--split", type=int, default=1, help="processes a stack (default: 1)")
    command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="stacks at once (default: one a core)")
    command.add_argument("--out", type=Path, default=EVIDENCE, help="where results go (default: docs/evidence)")
    command.add_argument("--keep", action="store_true", help="keep the environments")
    command.add_argument(
        "--packages",
        type=Path,
        help="a folder with one folder of installed packages for each stack (pip install --target): nothing is "
        "installed, for machines without a network",
    )
    command.set_defaults(act=run.run)

    command = commands.add_parser("beside", help="the shim beside libraries that patch the same classes")
    command.add_argument("others", nargs="*", metavar="LIBRARY", help="default: all of them")
    command.add_argument("--ci", action="store_true", help="only those of CI")
    command.add_argument(
        "--actions", nargs="+", default=[], metavar="ACTION", help="only these; what is known of the others stays"
    )
    command.add_argument("--out", type=Path, default=EVIDENCE, help="where results go (default: docs/evidence)")
    command.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: one a core)"
    )
    command.add_argument("--keep", action="store_true", help="take environments that are there as they are")
    command.set_defaults(act=beside.beside)

    command = commands.add_parser("canary", help="the newest pre-releases of everything")
    command.set_defaults(act=canary.canary)

    command = commands.add_parser("bisect", help="first and last affected release of a library")
    command.add_argument("patch", metavar="PATCH")
    command.add_argument("library", metavar="LIBRARY", help=", ".join(LIBRARIES))
    command.add_argument(
        "--cell", dest="stack", metavar="STACK", default="newest", help="pins of the other libraries (default: newest)"
    )
    command.add_argument("--bad", metavar="RELEASE", help="a release known to be affected (default: from the patch)")
    command.set_defaults(act=bisection.bisect)

    command = commands.add_parser("releases", help="the releases on the index")
    command.set_defaults(act=index.print_releases)

    options = parser.parse_args(argv)
    try:
        result: int = options.act(options)
    except UsageError as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    return result


if __name__ == "__main__":
    sys.exit(main())
