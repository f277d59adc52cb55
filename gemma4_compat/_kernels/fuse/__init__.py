"""Several operations as one kernel, with the bits of the original: their CUDA C++ is written here, and calls functions
of :mod:`cuda`. Called by :mod:`gemma4_compat._kernels.match.fusing`.

* :mod:`pointwise`: the operations, and the order in which PyTorch adds a mean.
* :mod:`writer`: writes a kernel of them. :mod:`run_writer`: one of large results. :mod:`row_writer`: one of rows.
  :mod:`row_kernels`: which kernels compute results that need means. :mod:`repeated`: those of layers that repeat are
  written once.
"""

from __future__ import annotations
