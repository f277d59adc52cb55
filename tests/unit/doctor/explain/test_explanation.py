"""``gemma4_compat.explain``: the command's answer inside a program, of an exception or of its text."""

from __future__ import annotations

import traceback

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli

CLIPPED = "Target module Gemma4ClippableLinear(...) is not supported"


def caught(message: str) -> Exception:
    try:
        try:
            raise ValueError(message)
        except ValueError as cause:
            raise RuntimeError("while loading") from cause
    except RuntimeError as error:
        return error


def test_an_exception_is_explained_with_its_cause() -> None:
    found = gemma4_compat.explain(caught(CLIPPED))
    assert found.certain[0].id == found.patches[0].id == "peft-clippable-linear"
    assert found.error == f"ValueError: {CLIPPED}"
    assert found.advice is None


def test_a_text_is_explained_as_the_command_does() -> None:
    text = f"ValueError: {CLIPPED}"
    printed = CliRunner().invoke(cli.app, ["explain", text]).stdout
    assert " ".join(str(gemma4_compat.explain(text)).split()) == " ".join(printed.split())


def test_a_common_error_has_advice_and_no_patch() -> None:
    found = gemma4_compat.explain("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert found.patches == found.certain == ()
    assert found.advice is not None
    assert found.advice.split("`")[1].startswith("gemma4-compat plan")


class Stopped(Exception):  # noqa: N818
    """A class whose name does not say that it is an error, as users write them."""


class Unreadable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


@pytest.mark.parametrize(
    "error, shown",
    [
        (RuntimeError(), "RuntimeError"),
        (AssertionError(), "AssertionError"),
        (KeyError(), "KeyError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (StopIteration(), "StopIteration"),
        (Stopped(), "Stopped"),
        (Stopped("too late"), "Stopped: too late"),
        (Unreadable(), "Unreadable: <exception str() failed>"),
    ],
)
def test_any_class_and_no_message(error: BaseException, shown: str) -> None:
    """Without a message, an error of the caller's own code is no patch's."""
    caught = raised(error)
    for given in (caught, "".join(traceback.format_exception(caught))):
        found = gemma4_compat.explain(given)
        assert found.error.rpartition(f"{__name__}.")[2] == shown
        assert found.patches == ()
        assert ("(without a message)" in found.text) == (":" not in shown)


@pytest.mark.parametrize("error", [NotImplementedError(), AssertionError()])
def test_no_message_and_no_traceback(error: BaseException) -> None:
    """The class alone may be one that a patch is about."""
    assert len(gemma4_compat.explain(error).patches) == 1
    assert not gemma4_compat.explain(error).certain


def test_a_group_of_exceptions() -> None:
    text = """  + Exception Group Traceback (most recent call last):
  |   File "train.py", line 12, in <module>
  |     raise ExceptionGroup("many", found)
  | ExceptionGroup: many (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: Target module Gemma4ClippableLinear(...) is not supported
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "train.py", line 9, in step
    | Stopped
    +------------------------------------
"""
    found = gemma4_compat.explain(text)
    assert (found.error, found.patches[0].id) == (f"ValueError: {CLIPPED}", "peft-clippable-linear")
    assert gemma4_compat.explain(text.replace(f"ValueError: {CLIPPED}", "ValueError: x")).error == "Stopped"


def test_the_command_takes_any_class_of_python() -> None:
    done = CliRunner().invoke(cli.app, ["explain", "KeyboardInterrupt"])
    assert (done.exit_code, done.stdout.splitlines()[0]) == (1, "KeyboardInterrupt")


def test_an_empty_text_is_one_line() -> None:
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="there is no error in this text"):
        gemma4_compat.explain(" ")
