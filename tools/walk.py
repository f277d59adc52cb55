"""What the first ``generate`` after ``decode_fast`` enters in this package: ``python -m tools.walk [--files]``.

A tiny model decodes eight tokens; on the CPU a stand-in captures and replays steps. It prints how many files and
functions a reader would have to visit, and how deep their calls are nested.
"""

from __future__ import annotations

import collections
import inspect
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = f"{Path(__file__).resolve().parent.parent / 'gemma4_compat'}/"


class Walk:
    """Functions of this package that a thread enters inside.

    Args:
        stand_ins: the folder whose functions do not count.
    """

    def __init__(self, stand_ins: Path) -> None:
        self._stand_ins = f"{stand_ins}/"
        self.functions: set[CodeType] = set()
        self.deepest = self._depth = 0

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        """As :func:`sys.setprofile` calls it."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # no module or class
        if is_function and not code.co_filename.startswith(self._stand_ins):
            self._depth += 1 if event == "call" else -1
            self.deepest = max(self.deepest, self._depth)
            self.functions.add(code)


def main() -> None:
    import gemma4_compat  # before transformers
    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins import tape
    from gemma4_compat._lab.workspace import Workspace

    walk = Walk(Path(tape.__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace.build(Path(folder))
        model, inputs = workspace.load(), workspace.inputs(text_only=True)
        with tape.standing_in(RECORDERS):
            gemma4_compat.decode_fast(model)
            sys.setprofile(walk.profile)
            model.generate(**inputs, max_new_tokens=8, min_new_tokens=8)
            sys.setprofile(None)
    files = collections.Counter(code.co_filename.removeprefix(PACKAGE) for code in walk.functions)
    print(*(f"{count:>4} {name}" for name, count in sorted(files.items()) if "--files" in sys.argv), sep="\n")
    print(f"{len(files)} files, {len(walk.functions)} functions, {walk.deepest} calls deep")


if __name__ == "__main__":
    main()
