from __future__ import annotations

from tests.unit.kernels.conftest import kernels_on_host as kernels_on_host
from tests.unit.kernels.conftest import models as models
from tests.unit.kernels.conftest import nothing_tried as nothing_tried
from tests.unit.kernels.conftest import on_host as on_host
from tests.unit.kernels.conftest import tapes as tapes
