"""The cache of keys and values: layers that share it (:mod:`shared_kv`), its names (:mod:`cache_names`), and how
``generate`` fills it (:mod:`prefill`).
"""

from __future__ import annotations
