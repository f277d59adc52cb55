"""Hardware that a machine lacks, imitated on its CPU.

* :mod:`second_device`: a second device. :mod:`tape`: CUDA graphs. :mod:`zero3`: a load under DeepSpeed's ZeRO-3.
* :mod:`flash`: flash attention. :mod:`cudnn`: cuDNN's attention on a Hopper GPU. :mod:`packed_weights`: our kernel for
  4-bit weights.
"""

from __future__ import annotations
