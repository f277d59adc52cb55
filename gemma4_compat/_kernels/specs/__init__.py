"""Kernels: which calls each one computes, and how it is launched. Its file in :mod:`cuda` says how it computes.

* :mod:`attention`, :mod:`flash`: attention of a step and of a prompt. :mod:`shares`: of training, between products.
  :mod:`shifting`: rows of a full sliding cache.
* :mod:`dense`: products with weights that are not quantized. :mod:`nf4_gemv`: 4-bit weights, by tensor cores.
  :mod:`nf4_exact`: 4-bit weights, with bitsandbytes' bits. :mod:`products`: what these three have in common.
* :mod:`head`: the best words of a head, from a copy of it in 8 bits. :mod:`cross_entropy`: training's loss.
* :mod:`nf4_dequantize`, :mod:`expert_rows`: dequantized weights, and those of the experts that a token hits.
  :mod:`expert_products`: products with experts. :mod:`expert_slots`: those of the host that stay on the card.
"""

from __future__ import annotations
