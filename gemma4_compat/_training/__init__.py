"""Training: layers replayed, the loss without all logits at once, MLPs without all intermediates.

* :mod:`chunks`: cross entropy of a head's logits, a few tokens at a time.
* :mod:`sharded`: a head that FSDP shards as its own unit.
* :mod:`loss`: a model's forward with labels.
* :mod:`mlp_chunks`: a module that computes each token by itself, a few tokens at a time, forward and backward.
* :mod:`mlp`: the MLPs of a model; it also asks for the next three.
* :mod:`norms`: the norms of text layers in chunks, which keep 16-bit inputs instead of float32 copies.
* :mod:`shared_states`: no second graph of keys and values that layers share.
* :mod:`per_layer`: no gradient of input embeddings through per-layer inputs, where nobody reads it.
* :mod:`captured`: steps of layers as CUDA graphs. :mod:`counting`: what the graphs of a model keep, for plans.
* :mod:`fast`: :func:`gemma4_compat.train_fast`. :mod:`parts`: which parts other than graphs it turns on.
* :mod:`modules`: what all of these ask of a module: its weights, its forward, and why it is not computed in chunks.
"""

from __future__ import annotations
