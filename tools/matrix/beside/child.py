"""One process: ``python -m tools.matrix.beside.child OTHER WAY SAMPLES``; the last line is what came of it, as JSON.

``WAY``: ``other`` (without the shim), ``shim`` (alone), ``shim first`` or ``other first``.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tools.matrix.beside.others import INTERPRETED, TURN_ON

WAYS = ("other", "shim", "shim first", "other first")


def main(other: str, way: str, samples: str, *names: str) -> dict[str, Any]:
    if way == "other":
        os.environ["GEMMA4_COMPAT_DISABLE"] = "all"
    said: list[str] = []
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught, _listening(said):
        warnings.simplefilter("always")
        _import(other, way)
        found: dict[str, Any] = {"import_s": round(time.perf_counter() - began, 1)}
        import gemma4_compat
        from gemma4_compat._lab.workspace import Workspace, never_wait_for_the_disk
        from tools.matrix.beside import actions

        never_wait_for_the_disk()
        import bitsandbytes, peft  # noqa: E401, F401  # isort: skip - so that patches of theirs are decided
        import transformers.models.gemma4.modeling_gemma4  # noqa: F401

        states = gemma4_compat.status()
        found["not as they were"] = {
            name: f"{one.state}: {one.reason}"
            for name, one in states.items()
            if str(one.state) == "failed" or one.reason_code == "in_part"
        }
        wanted = [name for name in actions.ACTIONS if not names or name in names]
        if way == "other":
            wanted = [name for name in wanted if name not in actions.OF_THE_SHIM]
        found["actions"] = {}
        table = actions.Table(Workspace(Path(samples)), short=other in INTERPRETED)
        for name, result in actions.done(table, wanted):
            found["actions"][name] = result
            if os.environ.get("BESIDE_VERBOSE"):
                print(name, result, round(time.perf_counter() - began, 1), file=sys.stderr, flush=True)
    ours = [str(one.message) for one in caught if "gemma4_compat" in str(one.category.__module__)]
    found["said"] = list(dict.fromkeys([*ours, *said]))
    found["seconds"] = round(time.perf_counter() - began, 1)
    return found


def _import(other: str, way: str) -> None:
    if way in ("shim", "shim first"):
        import gemma4_compat
    if way != "shim":
        TURN_ON[other]()
    if way == "other first":
        import gemma4_compat  # noqa: F401


@contextlib.contextmanager
def _listening(said: list[str]) -> Any:
    """Keep what the shim logs."""

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Kept(logging.WARNING)
    logging.getLogger("gemma4_compat").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("gemma4_compat").removeHandler(handler)


if __name__ == "__main__":
    output = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()):
        shown = json.dumps(main(*sys.argv[1:]))
    print("\n" + shown, file=output)
