"""Custom numerics in place of PyTorch's: attention, products and top-k of a step, and attention of prompts.

* :mod:`custom`: the operations of a step. :mod:`reading`: attention of prompts. :mod:`top_tokens`: sampling.
* :mod:`deferring`: which operations can be deferred. :mod:`fusing`: the small ones of a step, which few kernels
  compute. :mod:`on_demand`: those of a layer in training, whose results are large.
* :mod:`shares`: attention of training between its products.
* :mod:`dequantizing`: weights that bitsandbytes would dequantize, with its bits.
"""

from __future__ import annotations
