"""Fast decoding: the step of ``generate`` that reads one token, replayed as one CUDA graph.

* :mod:`decoder`: the call that ``generate`` takes for its steps; when it captures, replays, or runs as ever.
* :mod:`recording`: one captured step, on CUDA.
* :mod:`fused_steps`: a captured step captured again with fewer kernels, kept if its bits are the same. Its parts are
  :mod:`fusing` (operations put off), :mod:`pointwise` (what they compute), :mod:`kernel_source` (their CUDA C),
  :mod:`kernels` (compiled, tried, launched) and :mod:`bits` (equality).
* :mod:`dependencies`: what a captured step reads that a replay would not notice; looked at before every replay.
* :mod:`static_caches`: the tensors of a static cache, which graphs hold the addresses of.
* :mod:`obstacles`: why a model cannot be captured.
* :mod:`fast`: :func:`gemma4_compat.decode_fast`.
"""

from __future__ import annotations

from gemma4_compat._decoding.decoder import Statistics as Statistics
from gemma4_compat._decoding.decoder import statistics as statistics
