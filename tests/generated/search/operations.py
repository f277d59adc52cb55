"""What each operation of a sequence does, and what it shows: a mapping of names to tensors and plain values, or None.

Every operation is written once and runs on a model on one device and on a split one; what it shows must be the same.
Names of private helpers begin with an underscore; every other function of the modules listed below is an operation.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from tests.generated.search import operations_adapters, operations_forward, operations_model, operations_state

#: By name. Each is called with the world and the options of ``sequence.Operation``.
OPERATIONS: dict[str, Callable[..., dict[str, Any] | None]] = {
    name: function
    for module in (operations_forward, operations_adapters, operations_model, operations_state)
    for name, function in vars(module).items()
    if isinstance(function, FunctionType) and function.__module__ == module.__name__ and not name.startswith("_")
}
