"""Several turns of a conversation: a prompt that begins like the last one reads only what is new.

Called by ``patches/generation/transformers_reuse_prefix.py``; ``decode_fast`` only marks a model. Each ``generate``
of such a model is a :class:`session.Session`: it takes what the model keeps of the last conversation, finds the
longest common prefix, gives transformers a cache that holds this prefix, and keeps the cache afterwards.

* :mod:`session`: what a model keeps; and one ``generate``: whether it may reuse anything, and how much.
* :mod:`conversation`: a text, the cache that holds it, and how both are cut.
* :mod:`rows`: the keys and values in the layers of a cache, by position.
* :mod:`parked`: several conversations of one model, for ``gemma4-compat serve``.
* :mod:`returned`: the cache that a call returns after ``decode_fast``, with or without ``reuse_prefix``.
"""

from __future__ import annotations
