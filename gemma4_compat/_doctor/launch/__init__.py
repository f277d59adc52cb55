"""Programs that are started with the shim.

* :mod:`program`: ``gemma4-compat run``. :mod:`environment`: ``enable`` and ``disable``.
* :mod:`hook`: what Python reads at its start in these programs; it arms the shim at the first import of a library.
"""

from __future__ import annotations
