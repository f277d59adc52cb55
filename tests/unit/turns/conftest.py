from __future__ import annotations

from tests.unit.decoding.conftest import models as models
from tests.unit.decoding.conftest import tapes as tapes
