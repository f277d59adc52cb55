"""The command ``merge``: an adapter merged into its base, with measured parity.

* :mod:`job`: the merge, layer by layer. :mod:`resume`: resumes a killed merge.
* :mod:`adapter`: the saved adapter. :mod:`weights`: the base's, and which the merge starts from.
* :mod:`one_module`, :mod:`tensors`: the merged values. :mod:`quantized`: the result in 4 or 8 bits.
* :mod:`check`, :mod:`verification`: outputs of the merged model against those of base and adapter.
* :mod:`result`, :mod:`text`: the report.
"""

from __future__ import annotations
