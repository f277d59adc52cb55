"""The case: what a user's program does with the package. Runs by itself: from a folder, an archive, or frozen.

Two sizes. ``model``: a tiny Gemma 4, split over memory and disk, with an adapter, answers as on one device.
``stub``: what needs none of the libraries: arming, the status, readers and commands. Both end with a revert.

    python case.py SIZE SAMPLES [FOLDER ...]     # folders for sys.path; the outcome is the last line, as JSON
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

COMMANDS = (
    ["list", "--json"],
    ["explain", "peft-keep-dispatch"],
    ["scan", "SAMPLES/adapter-all", "--json"],
    ["needed", "SAMPLES/requirements.txt", "--json"],
    ["scan", "SAMPLES/nothing-here"],
)
WITH_LIBRARIES = (
    ["plan", "SAMPLES/checkpoint", "--vram", "1GiB"],
    ["scan", "SAMPLES/adapter-all", "SAMPLES/checkpoint"],
)


def outcome(size: str, samples: str) -> dict[str, Any]:
    """What happened, in a form that is the same wherever it is the same."""
    import gemma4_compat

    found: dict[str, Any] = {"size": size}
    if size == "model":
        found.update(_model(Path(samples)))
    more = WITH_LIBRARIES if size == "model" else ()
    states = gemma4_compat.status()
    found["failed"] = {name: one.reason for name, one in states.items() if str(one.state) == "failed"}
    found["states"] = dict(sorted(Counter(str(one.state) for one in states.values()).items()))
    found["commands"] = {" ".join(words[:3]): _command(words, samples) for words in (*COMMANDS, *more)}
    found["reverted"] = _reverted()
    return found


def _model(samples: Path) -> dict[str, Any]:
    from gemma4_compat._lab.workspace import Workspace, difference

    workspace = Workspace(samples)
    from peft import PeftModel

    def adapted(model: Any) -> Any:
        return workspace.outputs(PeftModel.from_pretrained(model, workspace.adapter("all")).eval())

    expected = adapted(workspace.load())
    found = {"difference": difference(expected, adapted(workspace.split()))}
    found["reaches_the_model"] = difference(expected, workspace.outputs(workspace.load())) > 0.0
    return found


def _command(words: list[str], samples: str) -> dict[str, Any]:
    """The exit code of a command, and the length and end of what it said."""
    from gemma4_compat import cli

    arguments = [word.replace("SAMPLES", samples) for word in words]
    before, output = sys.argv, io.StringIO()
    sys.argv = ["gemma4-compat", *arguments]
    code: Any = 0
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            cli.main()
    except SystemExit as error:
        code = error.code
    finally:
        sys.argv = before
    text = output.getvalue().replace(samples, "SAMPLES")
    return {"exit": code or 0, "said": " ".join(text.split())[-80:], "characters": len(text)}


def _reverted() -> bool:
    """Whether a revert leaves none of the replacements behind."""
    import gemma4_compat

    gemma4_compat.revert()
    on = {"applied", "pending"}
    return not on & {str(one.state) for one in gemma4_compat.status().values()}


def report(size: str, samples: str) -> str:
    """The outcome as a line of JSON; of an error, its traceback."""
    try:
        return json.dumps(outcome(size, samples), sort_keys=True)
    except BaseException as error:  # noqa: BLE001  # the one who asked gets it
        return json.dumps({"size": size, "error": f"{type(error).__name__}: {error}", "at": traceback.format_exc()})


def main() -> None:
    """As a program."""
    size, samples, *folders = sys.argv[1:]
    sys.path[:0] = folders
    print("\n" + report(size, samples))


if __name__ == "__main__":
    main()
