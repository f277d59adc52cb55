"""CUDA graphs of steps: captured, replayed, and captured again where something that they read has changed.

* :mod:`captured_calls`: the store of everything that is captured. :mod:`statistics` counts it, and has the causes of a
  recapture.
* :mod:`decoder`: what a model keeps: its stores and settings, and which captured calls belong to the model as it is.
  :mod:`guards`: whether the model has changed in a way that a replay would not notice. :mod:`unsupported`: why a model
  cannot be captured.
* :mod:`steps`: one step, its capture and its replay. :mod:`signatures`: which other steps its graph serves.
  :mod:`recording`: one captured step, on CUDA. :mod:`fused_steps` captures it again with fewer kernels.
* :mod:`static_caches`: the tensors of a static cache, whose addresses graphs hold. :mod:`new_caches` makes one and
  :mod:`initializing` fills it without upstream's Python.
* :mod:`deferred_stop`: when the host waits for a token. :mod:`step_inputs`: the inputs of a step, made from the last
  one's.
"""

from __future__ import annotations
