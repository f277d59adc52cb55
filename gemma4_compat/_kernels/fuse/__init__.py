"""Several operations as one kernel, with the bits of the original."""

from __future__ import annotations
