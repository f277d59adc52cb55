"""PEFT adapters: the keys of their weights, their configurations, failed loads.

* :mod:`saved`: a saved adapter's description. :mod:`translation`: its keys, for another class or from another tool.
* :mod:`fitting`: both loaders, PEFT's and transformers', fit adapters with this; it calls ``translation.translate``.
* :mod:`clipped`: Gemma 4's own linears. :mod:`matching`: which modules a configuration names.
* :mod:`rollback`: a model as it was before a failed load.
* :mod:`rows`: calls in which each row has an adapter of its own (``adapter_names``).
* :mod:`creation`, :mod:`state`, :mod:`mersenne`: a load without the work that it undoes (``peft_adapter_load``).
"""

from __future__ import annotations
