"""Features a user must enable: quantizing experts and offloaded modules, keeping layers packed.

Imports nothing upstream.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Sequence
from typing import Any

from gemma4_compat._engine import settings
from gemma4_compat._engine.io import notice
from gemma4_compat._engine.runtime import in_place


class OptIn:
    """A feature switched on for models loaded inside :meth:`enabled`, or by the environment for the whole process."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._enabled = contextvars.ContextVar(f"gemma4_compat {id}", default=False)

    def enabled(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the feature is enabled, only in this thread (and task). Can be nested."""
        return in_place.bound(self._enabled, True)

    def is_enabled(self) -> bool:
        """Whether the feature is enabled here (:meth:`enabled`) or for the process (``GEMMA4_COMPAT_ENABLE``)."""
        return self._enabled.get() or settings.is_enabled(self.id)


class Loading(contextlib.ContextDecorator):
    """What a public function returns for a ``with`` around a load. It warns if nobody enters it.

    Args:
        features: what is enabled inside.
        call: what the user wrote, for messages.
        check: called with each when it is entered; raises if that feature cannot work.
    """

    def __init__(self, features: Sequence[OptIn], call: str, check: Callable[[OptIn], None]) -> None:
        self._features, self._call, self._check = features, call, check
        self._used = False
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._used = True
        for feature in self._features:
            self._check(feature)
        for feature in self._features:
            self._inside.enter_context(feature.enabled())

    def __exit__(self, *error: Any) -> None:
        self._inside.close()

    def __call__(self, function: Any) -> Any:
        self._used = True
        return super().__call__(function)

    def _recreate_cm(self) -> Loading:
        return Loading(self._features, self._call, self._check)

    def __del__(self) -> None:
        if not self._used:
            notice.warn(
                f"{self._call} without `with` does nothing; load the model inside `with gemma4_compat.{self._call}:`, "
                f"or set GEMMA4_COMPAT_ENABLE={','.join(feature.id for feature in self._features)}"
            )


#: Experts are also quantized to 4 bits.
EXPERTS = OptIn("transformers-quantized-experts")
#: Modules that a device map offloads are quantized like the others.
OFFLOADED = OptIn("transformers-quantize-offloaded")
#: Layers of compressed-tensors stay packed, also where their model would fit without.
PACKED = OptIn("transformers-packed-layers")
