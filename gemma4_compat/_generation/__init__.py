"""What ``generate`` does with graphs: prompts, speculative steps, sampling, and a prefix that is read once.

* :mod:`prompts`, :mod:`speculative`, :mod:`sampling`, :mod:`prefix_cache`: one each.
* :mod:`expert_slots`: experts in host memory that stay on the card while a text is decoded.
* :mod:`experts_alone`: whether experts compute each token by itself, which drafts and batches need.
* :mod:`continuous`: texts that are decoded together, for ``gemma4-compat serve``.

Called by ``patches/generation``: :mod:`call` is the call that ``generate`` takes for its prompt and its steps,
:mod:`fast` is :func:`gemma4_compat.decode_fast`.
"""

from __future__ import annotations
