"""``explain`` of an error, for the command line and for programs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemma4_compat import _shim
from gemma4_compat._doctor.explain import answers, messages, search
from gemma4_compat._doctor.explain.messages import Said
from gemma4_compat._engine.io import arguments
from gemma4_compat._engine.patch import Patch, PatchStatus
from gemma4_compat._errors import Gemma4CompatError


@dataclass(frozen=True)
class Explanation:
    """What is known about an error; ``print`` it to read it.

    Attributes:
        error: the error that was recognized, its class and message.
        patches: the patches it may concern, the most probable first.
        certain: those of them whose error no other program raises.
        advice: what a common error or symptom is, and what to do about it, with patches or without; else None.
        text: all of it, for a reader.
    """

    error: str
    patches: tuple[Patch, ...]
    certain: tuple[Patch, ...]
    advice: str | None
    text: str

    def __str__(self) -> str:
        return self.text


def explain(error: BaseException | str) -> Explanation:
    """Find the patch that repairs an error or a symptom, or what else to do about it.

    >>> try:
    ...     model = PeftModel.from_pretrained(model, "my-adapter")
    ... except Exception as error:
    ...     print(gemma4_compat.explain(error))
    ...     raise

    Imports no library. ``gemma4-compat explain`` is the same as a command.

    Args:
        error: an exception that was caught, whose traceback and causes count as well; or the text of an error, of a
            traceback or of a log, of which the last 256 Ki characters are read; or what is wrong, in words.

    Raises:
        Gemma4CompatError: the text is empty, or ``error`` is neither an exception nor a text.
    """
    if not isinstance(error, (str, BaseException)):
        raise Gemma4CompatError(
            f"explain needs an exception that was caught, or the text of an error; got {arguments.shown(error)}. "
            "Call it where the error is caught: `except Exception as error: print(explain(error))`"
        )
    pasted = isinstance(error, str)
    text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
    return look_up(read(text, pasted=pasted), _shim.patches(), _shim.status())[0]


def read(text: str, *, pasted: bool = True) -> Said:
    """What a text, which may be ``pasted``, says.

    Raises:
        Gemma4CompatError: there is no error in the text.
    """
    said = messages.read(text, pasted=pasted)
    if not said.messages:
        raise Gemma4CompatError("there is no error in this text; give the error or the whole traceback")
    return said


def look_up(
    said: Said, patches: Sequence[Patch], statuses: Mapping[str, PatchStatus], width: int | None = None
) -> tuple[Explanation, dict[str, Any]]:
    """The explanation of a text, and the same as plain data without the patches."""
    answer = answers.sorted_answer(search.answer(said, patches), said, statuses)
    data = answers.answer_data(said, answer)
    explanation = Explanation(
        error=data["error"],
        patches=tuple(match.patch for match in answer.matches),
        certain=tuple(match.patch for match in answer.matches if match.certain),
        advice=data["advice"],
        text=answers.answer_text(said, answer, statuses, width),
    )
    return explanation, data
