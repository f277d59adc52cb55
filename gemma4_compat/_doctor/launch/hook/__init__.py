"""Not for import: ``run`` and ``enable`` put this folder on the search path of a Python that starts."""

from __future__ import annotations
