"""Arms, applies and undoes patches. Knows nothing about Gemma 4, and nothing about reproductions.

Called by :mod:`gemma4_compat._shim`, which has the one :class:`engine.Engine` and gives it the registry.

* :mod:`patch`: what a patch declares, and what the engine says about it.
* :mod:`hooks`: calls the engine when a module has been imported. :mod:`engine`: decides, applies, reverts.
* :mod:`gate`: what settings and versions decide. :mod:`settings`: environment variables and pyproject.toml.
  :mod:`versions`: which release is installed.
* :mod:`detection`, :mod:`fingerprint`: whether the loaded code is the code the patch was proven on.
* :mod:`changes`: replaces functions, and undoes that. :mod:`dormant`: what costs nothing until it is needed.
* :mod:`holders`: who still holds upstream's functions. :mod:`autoreload`: Jupyter's autoreload.
* :mod:`reports`: states in words. :mod:`runtime`: objects and threads of this process. :mod:`io`: text, files and
  warnings.
"""

from __future__ import annotations
