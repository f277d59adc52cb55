"""``tests.world.gpu.two_gpus`` on a CPU that copies 16-bit floats as a GPU does."""

from __future__ import annotations

import gemma4_compat  # isort: skip  (first, as a user would)  # noqa: F401

import sys

from gemma4_compat._lab import sharding
from tests.world.gpu import two_gpus

if __name__ == "__main__":
    with sharding.copies("cpu"):
        sys.exit(two_gpus.main(sys.argv[1:]))
