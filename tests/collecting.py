"""Tests that look at many cases of data that is ready: one test, one message that names every case that fails."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest

#: What ``--case`` names: cases whose name does not contain it are left out.
chosen: list[str] = []

#: Lines of a failed assertion that are shown of each case.
LINES = 12


def name_of(case: Any) -> str:
    """Its id, its name or what it says it is, as far as one line shows it."""
    text = getattr(case, "id", None) or getattr(case, "name", None) or str(case)
    return str(text).partition("\n")[0][:100]


def collect_failures(**factor: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``@collect_failures(patch=PATCHES)``: run the test for each patch, and fail once, naming all that failed.

    It is for looks at data that a fixture computed once. A case that computes something of its own is parametrized
    instead, so that pytest-xdist can hand it to another worker. A case may skip; the test is skipped when all do.
    """
    ((parameter, values),) = factor.items()
    cases = list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def every_case(**fixtures: Any) -> None:
            failures, skipped = [], []
            picked = [case for case in cases if all(text in name_of(case) for text in chosen)]
            for case in picked:
                try:
                    test(**fixtures, **{parameter: case})
                except pytest.skip.Exception as reason:
                    skipped.append(str(reason))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  (it is told below)
                    failures.append(f"{name_of(case)} ({_where(error, test)}): {_said(error)}")
            if failures:
                told = "\n".join(failures)
                pytest.fail(f"{len(failures)} of {len(picked)} fail:\n{told}", pytrace=False)
            if len(skipped) == len(picked):
                pytest.skip("; ".join(dict.fromkeys(skipped)) or f"no case is named {' and '.join(chosen)}")

        parameters = [value for name, value in signature.parameters.items() if name != parameter]
        every_case.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return every_case

    return decorate


def _where(error: BaseException, test: Callable[..., None]) -> str:
    """The line of the test that raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.name == test.__name__]
    return f"line {lines[-1]}" if lines else "not in the test"


def _said(error: BaseException) -> str:
    text = str(error) if isinstance(error, (AssertionError, pytest.fail.Exception)) else repr(error)
    lines = text.splitlines() or [type(error).__name__]
    return "\n  ".join(lines[:LINES] + ["..."] * (len(lines) > LINES))
