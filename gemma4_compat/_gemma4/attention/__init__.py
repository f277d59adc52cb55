"""Masks, kernels, and what attention makes of a query that sees no key.

* :mod:`flash`: heads too wide for flash kernels.
* :mod:`windows`: sliding layers, a block of queries at a time. :mod:`block_layout`: which keys a block needs,
  :mod:`gathered`: those keys as one tensor. :mod:`layers`: whose layer it is, and its groups of heads.
* :mod:`products`: wide heads in training, or all heads. :mod:`tracing`: whether a mask can be looked at.
* :mod:`packing`: several texts in one row. :mod:`weights`: of kernels that return none.
* :mod:`masks`: prompts with images. :mod:`unseen_keys`: queries that see no key, as padding gives them.
"""

from __future__ import annotations
