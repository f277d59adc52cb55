from __future__ import annotations

from tests.unit.decoding.conftest import tapes as tapes
