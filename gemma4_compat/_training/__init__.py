"""Training: compute the loss of a language model without all of its logits at once.

* :mod:`chunks`: cross entropy of a head's logits, a few tokens at a time.
* :mod:`head`: calling a head for several chunks; offloaded weights are onloaded only once.
* :mod:`sharded`: a head that FSDP shards as its own unit.
* :mod:`loss`: a model's forward with labels; :func:`gemma4_compat.chunked_loss`.
"""
