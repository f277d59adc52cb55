"""A plan's arguments and their defaults are the same in its function, its request and its command."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gemma4_compat._plan import plan, training
from gemma4_compat.cli import planning

CASES = [
    (plan.plan_device_map, plan.Request, planning.plan, {"attention", "balanced"}),
    (training.plan_training, training.Request, planning.plan_training, set[str]()),
]


def arguments(function: Any) -> dict[str, Any]:
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("function, request_type, command, only_in_python", CASES)
def test_arguments_are_the_same(function: Any, request_type: Any, command: Any, only_in_python: set[str]) -> None:
    expected = arguments(function)
    assert arguments(request_type) == expected
    shown = arguments(command)
    assert shown.pop("as_json") is False
    assert shown == {name: value for name, value in expected.items() if name not in only_in_python}
