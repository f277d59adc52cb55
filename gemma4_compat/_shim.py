"""The engine of this process, with every patch."""

from __future__ import annotations

from gemma4_compat._engine.engine import Engine
from gemma4_compat.patches import registry

engine = Engine(registry.load())
