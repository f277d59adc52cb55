"""Custom numerics in place of PyTorch's: attention, products and top-k of a step, and attention of prompts.

* :mod:`custom`: the operations of a step. :mod:`reading`: attention of prompts. :mod:`top_tokens`: sampling.
* :mod:`fusing`: defers the small operations of a step, and computes them in few kernels.
* :mod:`dequantizing`: weights that bitsandbytes would dequantize, with its bits.
"""

from __future__ import annotations
