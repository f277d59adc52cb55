"""A child process of a check: it reads an order as JSON from standard input, and says each event as a line of JSON.

``python -m gemma4_compat._doctor.check.child``. What libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from gemma4_compat._doctor import processes
from gemma4_compat._doctor.check import errors


def main() -> int:
    """Do what the order says; 0 also if a step of it has crashed."""
    say = processes.events()
    order: dict[str, Any] = json.load(sys.stdin)
    try:
        with _stand_in(order):
            _run(order, say)
    except Exception as error:
        say({"failed": order["kind"], "error": errors.described(error)})
    say({"end": True})
    return 0


def _run(order: dict[str, Any], say: Any) -> None:
    if order["kind"] == "survey":
        from gemma4_compat._doctor.check import survey

        survey.run(order, say)
    elif order["kind"] == "merge":
        from gemma4_compat._doctor.check import merged

        merged.run(order, say)
    else:
        from gemma4_compat._doctor.check.case import Case

        Case(order, say).run()


def _stand_in(order: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """For the tiny model without a GPU: the stand-in for CUDA graphs that the tests have."""
    if not order.get("tape"):
        return contextlib.nullcontext()
    # Before the stand-in: a module of torch writes a type as `Event | None`.
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins import tape

    return tape.standing_in(RECORDERS)


if __name__ == "__main__":
    sys.exit(main())
