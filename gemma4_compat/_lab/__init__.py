"""Tiny models, and the scenarios in which a reproduction shows a defect.

Called by the reproductions at the end of each patch file, by ``doctor`` and by the tests.

* :mod:`workspace`: a folder with a tiny checkpoint and its adapters, and ways to load, dispatch and compare them.
* :mod:`tiny`, :mod:`tiny_models`, :mod:`tiny_configs`, :mod:`tiny_adapters`, :mod:`tiny_qat`: what is in it.
* :mod:`relatives`: tiny models of other families with Gemma 4's parts.
* :mod:`scenarios`: what several reproductions share. :mod:`assistants`: a model and its assistant.
* :mod:`trained`: the repository's trained model, of ``doctor --show`` and of tests.
* :mod:`sharding`: FSDP2 over two ranks in one process.
* :mod:`stand_ins`: for devices and libraries that this machine lacks.
"""

from __future__ import annotations
