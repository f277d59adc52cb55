"""What a Gemma 4 is, in transformers, accelerate, PEFT and bitsandbytes.

* :mod:`models`: its parts and shapes. :mod:`cache`: its key-value cache. :mod:`attention`: how it attends.
* :mod:`quantization`, :mod:`adapters`, :mod:`accelerate`: what these libraries make of it.
* :mod:`checkpoint`: the files of a model. :mod:`host`: what this machine has. :mod:`state`: what a forward depends on.
"""

from __future__ import annotations
