"""Fast decoding: the step of ``generate`` that reads one token, replayed as one CUDA graph.

Called by ``patches/generation/transformers_graph_decoding.py``; ``decode_fast`` (:mod:`fast`) only marks a model. The
patched ``generate`` asks whether to compile (``_valid_auto_compile_criteria``) and gets a :class:`decoder.Decoder`
from ``get_compiled_call``. That decoder is then called once a token; it captures, replays, or runs the model itself.
``transformers_deferred_stop`` calls :mod:`deferral`.

* :mod:`decoder`: the call that ``generate`` takes for its steps.
* :mod:`steps`: one step and its inputs, and which other steps the same graph serves.
* :mod:`recording`: one captured step, on CUDA.
* :mod:`dependencies`: what a captured step has read that a replay would not notice. It is checked before every replay;
  a difference is why a graph is captured again.
* :mod:`snapshots`: what it compares; :mod:`recaptures`: the causes, as ``statistics`` counts them.
* :mod:`fused_steps`: a captured step captured again with fewer kernels, kept if its bits are the same. Its parts are
  :mod:`fusing` (operations put off), :mod:`pointwise` (what they compute), :mod:`kernel_source` (their CUDA C),
  :mod:`kernels` (compiled, tried, launched) and :mod:`bits` (equality).
* :mod:`expert_rows`: one kernel for the 4-bit weights of the experts that a token hits.
* :mod:`static_caches`: the tensors of a static cache, whose addresses graphs hold.
* :mod:`deferral`: when the host waits for a token.
* :mod:`obstacles`: why a model cannot be captured.
* :mod:`fast`: :func:`gemma4_compat.decode_fast`.
"""

from __future__ import annotations

from gemma4_compat._decoding.decoder import Statistics as Statistics
from gemma4_compat._decoding.decoder import statistics as statistics
