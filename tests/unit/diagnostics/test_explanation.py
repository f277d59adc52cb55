"""``gemma4_compat.explain``: the command's answer inside a program, of an exception or of its text."""

from __future__ import annotations

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


def test_an_empty_text_is_one_line() -> None:
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="there is no error in this text"):
        gemma4_compat.explain(" ")
