"""A view of an object: what the view does not define itself is the object's.

:class:`PlainView` is for what ``torch.compile`` may trace: it cannot trace a proxy of C, as :class:`proxies.Proxy` is.
"""

from __future__ import annotations

from typing import Any


class PlainView:
    """An object of which some attributes are others. What is set is the view's own.

    Args:
        of: the object.
        others: attributes, by name.
    """

    def __init__(self, of: Any, **others: Any) -> None:
        self._of = of
        for name, value in others.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "_of":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._of, name)
