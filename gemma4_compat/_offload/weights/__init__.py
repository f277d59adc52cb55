"""Offloaded weights: read, replaced, loaded, saved, tied and adapted.

* :mod:`stored_weights`: reading and replacing them. :mod:`state_loading`: state dicts.
* :mod:`tied_pairs`, :mod:`tied_weights`, :mod:`joined_weights`: weights that share one parameter on one device.
* :mod:`gathered_weights`: offloaded modules that temporarily have their weights.
* :mod:`peft_layers`: PEFT on offloaded layers. :mod:`dispatched_adapters`: a model dispatched after its adapters.
* :mod:`merged_layers`: merging and unmerging.
"""

from __future__ import annotations
