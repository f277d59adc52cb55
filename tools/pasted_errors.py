"""Collect what reproductions raise without the shim, as users would paste it: the data of test_pasted_errors.py.

``PYTHON_OF_A_STACK -m tools.pasted_errors STACK [ID ...]`` runs the reproductions that raised in this stack
(docs/evidence). It adds their errors, with the frames of their tracebacks, to pasted_errors.json beside that test. An
error that differs from one there only in numbers is left out. Frames of this package stand for the user's program.
Then it writes gemma4_compat/_doctor/explain/places.json: where the error of each patch was raised.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"GEMMA4_COMPAT_DISABLE": "all", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

from gemma4_compat import _shim
from gemma4_compat._doctor.explain import messages, search
from gemma4_compat._doctor.reproductions import child
from gemma4_compat._engine.patch import Outcome
from gemma4_compat._lab.workspace import Workspace, never_wait_for_the_disk
from tools.matrix import stacks

FILE = Path(__file__).parents[1] / "tests" / "unit" / "doctor" / "explain" / "pasted_errors.json"
PLACES = Path(__file__).parents[1] / "gemma4_compat" / "_doctor" / "explain" / "places.json"
#: Crashes that come first, whatever the reproduction is about: the text, the place, and the patch that repairs it.
FIRST = (
    ("KeyError: 3", "", "transformers-shared-kv"),
    ("TypeError: Params4bit.__new__()", "", "accelerate-hf-initialized"),
    ("ValueError: The set of layer types producing a cache", "", "transformers-assistant-sharing"),
    ("ValueError: Target module Gemma4ClippableLinear", "", "peft-clippable-linear"),
    ("RuntimeError: Function MmBackward0 returned an invalid gradient", "", "accelerate-train-offloaded"),
    ("NotImplementedError: Cannot copy out of meta", "bitsandbytes/functional.py to", "bitsandbytes-meta-quant-state"),
)
_ERROR = re.compile(r"(?:gemma4(?:_unified)?: )?\w+(?:Error|Exception)\b")
_SECONDS = 200


def main(argv: list[str]) -> int:
    stack, *ids = argv
    kept = read()
    known = {_key(one) for one in kept}
    with tempfile.TemporaryDirectory(prefix="pasted-errors-") as folder:
        context = multiprocessing.get_context("fork")
        builder = context.Process(target=Workspace.build, args=(Path(folder),))
        builder.start()
        builder.join()
        child.import_targets(_shim.engine.patches())
        for patch_id in ids or _raising(stack):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(patch_id, Path(folder), sender))
            process.start()
            found = receiver.recv() if receiver.poll(_SECONDS) else []
            process.kill()
            for one in found:
                one |= {"patch": _repairing(one) or patch_id, "stack": stack}
                if _key(one) not in known:
                    known.add(_key(one))
                    kept.append(one)
            print(f"{patch_id}: {[one['error'][:80] for one in found]}", flush=True)
    _write(kept)
    return 0


def read(file: Path = FILE) -> list[dict[str, Any]]:
    """What is there: each error with its patch, its stack, its text and its frames, the outermost first.

    A frame is its file below site-packages, the line, the function, its qualified name, and the line's text.
    """
    if not file.exists():
        return []
    data = json.loads(file.read_text(encoding="utf-8"))
    return [one | {"frames": [data["frames"][index] for index in one["frames"]]} for one in data["errors"]]


def _write(errors: list[dict[str, Any]]) -> None:
    """Errors have most frames in common, so each is written once."""
    numbers: dict[str, int] = {}
    lines = []
    for one in sorted(errors, key=lambda one: (one["patch"], one["stack"])):
        frames = [numbers.setdefault(json.dumps(frame), len(numbers)) for frame in one["frames"]]
        lines.append(json.dumps(one | {"frames": frames}))
    errors_text, frames_text = (",\n".join(each) for each in (lines, numbers))
    FILE.write_text(f'{{\n"errors": [\n{errors_text}\n],\n"frames": [\n{frames_text}\n]\n}}\n', encoding="utf-8")
    PLACES.write_text(places(errors), encoding="utf-8")


def _raising(stack: str) -> list[str]:
    """The patches whose reproductions raised in this stack, as docs/evidence has it."""
    results = stacks.results()[stack]["patches"].items()
    details = {name: (found.get("off") or {}).get("detail", "") for name, found in results}
    return [patch.id for patch in _shim.engine.patches() if _ERROR.match(details.get(patch.id, ""))]


def _run(patch_id: str, folder: Path, sender: Any) -> None:
    """Send the errors of a reproduction, also of those that it catches itself to describe them."""
    never_wait_for_the_disk()
    caught: list[BaseException] = []
    described = Outcome.of_error
    Outcome.of_error = staticmethod(lambda error: caught.append(error) or described(error))  # type: ignore[method-assign]
    patch = {patch.id: patch for patch in _shim.engine.patches()}[patch_id]
    try:
        patch.reproduce(Workspace(folder))
    except Exception as error:  # noqa: BLE001 - the user's crash is the result here
        caught.append(error)
    sender.send([_pasted(error, folder) for error in caught[:1]])


def _pasted(error: BaseException, folder: Path) -> dict[str, Any]:
    frames: list[list[Any]] = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        file = re.sub(r".*/(?:site-packages|lib/python3\.\d+)/", "", code.co_filename)
        if file != code.co_filename:
            source = traceback.linecache.getline(code.co_filename, line).strip()  # type: ignore[attr-defined]
            frames.append([file, line, code.co_name, getattr(code, "co_qualname", code.co_name), source])
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return {"error": f"{name}: {error}".replace(str(folder), "/home/me/models"), "frames": frames}


def _repairing(one: dict[str, Any]) -> str | None:
    """The patch of :data:`FIRST` that repairs an error."""
    where = place(one) or ""
    return next((name for text, at, name in FIRST if one["error"].startswith(text) and where.startswith(at)), None)


def _key(one: dict[str, Any]) -> tuple[str, str, str | None]:
    return one["patch"], re.sub(r"[\d.,]+", "", one["error"])[:80], place(one)


def place(one: dict[str, Any]) -> str | None:
    """Where an error left the libraries."""
    return search.place_of([messages.Frame(frame[0], frame[2]) for frame in one["frames"]])


def places(errors: list[dict[str, Any]]) -> str:
    """The file with the places of all errors."""
    found: dict[str, dict[str, None]] = {}
    for one in sorted(errors, key=lambda one: (one["patch"], place(one) or "")):
        if (where := place(one)) is not None:
            found.setdefault(one["patch"], {})[where] = None
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(list(each))}" for name, each in found.items())
    return f"{{\n{lines}\n}}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
