"""CUDA graphs of steps: captured, replayed, and captured again where something that they read has changed.

* :mod:`decoder`: what a model keeps: its graphs, in :mod:`graphs`, and their statistics.
* :mod:`steps`: one step and its inputs, and which other steps the same graph serves. :mod:`recording`: one captured
  step, on CUDA. :mod:`fused_steps` captures it again with fewer kernels.
* :mod:`guards`: whether the model is still what it was. :mod:`recaptures`: the causes, as the statistics count them.
  :mod:`unsupported`: why a model cannot be captured.
* :mod:`static_caches`: the tensors of a static cache, whose addresses graphs hold. :mod:`new_caches` makes one and
  :mod:`initializing` fills it without upstream's Python.
* :mod:`deferral`: when the host waits for a token. :mod:`advancing`: the inputs of a step, made from the last one's.
"""

from __future__ import annotations
