"""Several operations as one kernel, with the bits of the original. Called by the steps that are captured
(:mod:`gemma4_compat._graphs.fused_steps`).

* :mod:`fusing`: defers the small operations of a step, and computes them in few kernels.
* :mod:`pointwise`: the operations that it defers, and the order in which PyTorch adds a mean.
* :mod:`writer`: writes a kernel of them. :mod:`row_writer`: one of rows. :mod:`row_kernels`: which kernels compute
  results that need means.
"""

from __future__ import annotations
