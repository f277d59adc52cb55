"""A view of an object that passes for it: ``isinstance``, ``super()``, ``dir``, and what is set. Imports wrapt."""

from __future__ import annotations

import wrapt


class Proxy(wrapt.ObjectProxy):  # type: ignore[type-arg]  # before 2.0 it takes none
    """What a subclass does not define is the object's, which is ``__wrapped__``. So is what is set.

    Names that begin with ``_self_`` are the proxy's own. A proxy lasts for one call: wrapt refuses to copy or pickle
    it. ``torch.compile`` cannot trace it: see :class:`views.PlainView`.
    """
