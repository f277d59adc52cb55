"""The engine of this process, with every patch."""

from __future__ import annotations

from gemma4_compat import _registry
from gemma4_compat._engine import Engine

engine = Engine(_registry.load())
