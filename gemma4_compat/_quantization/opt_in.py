"""What a user has to enable: quantizing experts, and quantizing what is offloaded. Imports nothing upstream."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from gemma4_compat._engine import settings


class OptIn:
    """A choice made for the models loaded inside :meth:`enabled`, or for the whole process in its environment."""

    def __init__(self, id: str) -> None:
        self.id = id
        self._enabled = contextvars.ContextVar(f"gemma4_compat {id}", default=False)

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """Inside, in this thread (and task) alone, it is enabled. Nests."""
        token = self._enabled.set(True)
        try:
            yield
        finally:
            self._enabled.reset(token)

    def is_enabled(self) -> bool:
        """Whether it is enabled here (:meth:`enabled`), or for the process (``GEMMA4_COMPAT_ENABLE``)."""
        return self._enabled.get() or settings.is_enabled(self.id)


#: Experts are quantized to 4 bits, too.
EXPERTS = OptIn("transformers-quantized-experts")
#: Modules that a device map offloads are quantized like the others.
OFFLOADED = OptIn("transformers-quantize-offloaded")
