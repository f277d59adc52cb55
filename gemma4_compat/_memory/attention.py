"""How many bytes attention takes beside queries, keys and values, where there is a mask.

``scaled_dot_product_attention`` makes numbers of a bool mask, in the dtype of the queries, and copies them for a GPU's
memory-efficient kernel. That copy is inferred, not observed: for 131,072 tokens of an E2B in chunks of 512 and 1,024,
plans with it are at most 4 % below the higher peaks, plans without it 7 %
(benchmarks/results/2026-11-27-h100/contexts-before-E2B.json). transformers copies keys and values for each query head:
no kernel has both a mask and grouped heads.
"""

from __future__ import annotations

#: Bytes per score with eager attention: bf16, masked, fp32, bf16 again.
EAGER_SCORES = 10


def mask_as_numbers(pairs: int, item: int) -> int:
    """Bytes of a mask as numbers.

    Args:
        pairs: of a query and a key.
        item: bytes of a number.
    """
    return pairs * item


def repeated(keys: int, heads: int, kv_heads: int, head_dim: int, item: int) -> int:
    """Bytes of keys and values, once for each query head, of ``keys`` tokens; one head is broadcast as a view."""
    return 2 * keys * heads * head_dim * item if 1 < kv_heads < heads else 0
