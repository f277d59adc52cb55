"""Training: the loss of a language model without all of its logits at once.

* :mod:`chunks`: cross entropy of a head's logits, some tokens at a time.
* :mod:`head`: a head as it is called for several chunks: offloaded weights are onloaded once.
* :mod:`sharded`: a head that FSDP shards as a unit of its own.
* :mod:`loss`: a model's forward with labels; :func:`gemma4_compat.chunked_loss`.
"""
