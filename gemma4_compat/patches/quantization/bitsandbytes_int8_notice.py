"""8-bit layers log only once that they cast their inputs.

Symptom: silent: no error, but the log has ``MatMul8bitLt: inputs will be cast from torch.bfloat16`` from each 8-bit
layer in each forward: 2,040 lines for 20 tokens of a model of six layers.

Cause: From 0.50.0 on ``MatMul8bitLt.forward`` logs the sentence instead of warning; Python shows the same warning only
once.

Fix: The sentence is logged once for each dtype. That logger's other lines are untouched.

The defect and the fix are the same for every model, so this patch is not restricted to Gemma 4.

Remove when: in all supported releases bitsandbytes says it once, or not at all.
"""

import logging
from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F100", kind="notice", severity="speed", affected=">=0.50.0", acts_on="every model")

_MODULE = "bitsandbytes.autograd._functions"
_SENTENCE = "MatMul8bitLt: inputs will be cast"


class _Once(logging.Filter):
    """Drops the sentence if it was already logged for that dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[Any] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(_SENTENCE):
            return True
        known = record.args in self.said
        self.said.add(record.args)
        return not known


_once = _Once()


@PATCH.replaces("bitsandbytes.autograd._functions", "MatMul8bitLt.forward")
def forward(original: Original, *args: Any, **kwargs: Any) -> Any:
    import torch

    if torch.compiler.is_compiling():  # nothing is logged then
        return original(*args, **kwargs)
    logger = logging.getLogger(_MODULE)
    logger.addFilter(_once)
    try:
        return original(*args, **kwargs)
    finally:
        logger.removeFilter(_once)


def reproduce(workspace: Workspace) -> Outcome:
    """How often one forward logs it."""
    import torch

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    model = workspace.load("8bit")
    logger = logging.getLogger(_MODULE)
    logger.addHandler(handler)
    try:
        with torch.no_grad():
            model(**workspace.inputs(text_only=True))
    finally:
        logger.removeHandler(handler)
    said = sum(line.startswith(_SENTENCE) for line in lines)
    return Outcome(said > 1, f"one forward logs {said} times: {_SENTENCE}" if said else "nothing is logged")
