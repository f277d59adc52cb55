"""Training: compute a model's loss without all of its logits at once, and its MLPs without all intermediates.

* :mod:`chunks`: cross entropy of a head's logits, a few tokens at a time.
* :mod:`head`: calling a head for several chunks; offloaded weights are onloaded only once.
* :mod:`sharded`: a head that FSDP shards as its own unit.
* :mod:`loss`: a model's forward with labels.
* :mod:`pieces`: a module that computes each token by itself, a few tokens at a time, forward and backward.
* :mod:`mlp`: the MLPs of a model; it also asks for the next three.
* :mod:`norms`: the norms of text layers in pieces, which keep 16-bit inputs instead of float32 copies.
* :mod:`shared_states`: no second graph of keys and values that layers share.
* :mod:`per_layer`: no gradient of input embeddings through per-layer inputs, where nobody reads it.
* :mod:`whole`: why a module is not computed in pieces.
* :mod:`inner`: a forward replaced inside of accelerate's hook.
"""
