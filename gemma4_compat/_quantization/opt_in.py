"""Features a user must enable: quantizing experts and quantizing offloaded modules. Imports nothing upstream."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from gemma4_compat._engine import settings


class OptIn:
    """A feature switched on for models loaded inside :meth:`enabled`, or by the environment for the whole process."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._enabled = contextvars.ContextVar(f"gemma4_compat {id}", default=False)

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """Inside, the feature is enabled, only in this thread (and task). Can be nested."""
        token = self._enabled.set(True)
        try:
            yield
        finally:
            self._enabled.reset(token)

    def is_enabled(self) -> bool:
        """Whether the feature is enabled here (:meth:`enabled`) or for the process (``GEMMA4_COMPAT_ENABLE``)."""
        return self._enabled.get() or settings.is_enabled(self.id)


#: Experts are also quantized to 4 bits.
EXPERTS = OptIn("transformers-quantized-experts")
#: Modules that a device map offloads are quantized like the others.
OFFLOADED = OptIn("transformers-quantize-offloaded")
