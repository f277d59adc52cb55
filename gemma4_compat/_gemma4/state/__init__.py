"""What a forward depends on, and whether that has changed.

* :mod:`contents`: whether a tensor was written to. :mod:`snapshots`: what an object was.
* :mod:`checkpointing`: whether a cache survives it. :mod:`capturing`: what transformers collects of a forward.
"""

from __future__ import annotations
