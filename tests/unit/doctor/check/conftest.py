from __future__ import annotations

from tests.unit.generation.conftest import tapes as tapes
