"""The kernels, as CUDA C++. :mod:`gemma4_compat._kernels.programs` reads the files; each says who launches its kernels,
and which test proves them.

* ``prelude.cuh``: what every kernel needs.
"""

from __future__ import annotations
