"""Read and write safetensors files tensor by tensor, and checkpoints in several files.

* :mod:`header`: names, types and offsets.
* :mod:`shards`: reading and writing. :mod:`folders`: an output folder appears complete or not at all.
"""

from __future__ import annotations
