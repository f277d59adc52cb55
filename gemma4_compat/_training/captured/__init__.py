"""Training steps as CUDA graphs, one for each kind of layer and shape, forward and backward.

:mod:`layers` captures and replays, :mod:`graphs` are two graphs of a layer, :mod:`calls` what a layer is called with.
:mod:`fusing` has the graphs captured with fused kernels.
"""

from __future__ import annotations
