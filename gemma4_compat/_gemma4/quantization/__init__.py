"""4-bit and 8-bit weights of bitsandbytes: their states, experts, offloaded layers.

* :mod:`quant_states`: copies of a ``QuantState``. :mod:`bytes`: how many bytes a quantized weight takes.
* :mod:`config`, :mod:`skip_modules`: what is to be quantized, and what is better not.
* :mod:`offloaded`: what a device map offloads. :mod:`opt_in`: what a user enables.
* :mod:`experts`, :mod:`expert_storage`, :mod:`expert_forward`: experts in 4 bits.
* :mod:`scale_loading`: scales in ``load_state_dict``.
* :mod:`plain_layers`: PEFT's layers over plain ones.
* :mod:`qat`, :mod:`other_quantizers`: layers of other quantizers. :mod:`packed_linear`: those that stay packed,
  and experts.
"""

from __future__ import annotations
