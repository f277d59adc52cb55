"""What ``gemma4-compat run`` has each Python import at its start; then that Python's own sitecustomize, if it has one.

Every Python that the program starts reads this, including old ones: no syntax that they lack.
"""

import os
import sys

_FOLDER = os.path.dirname(__file__)
_POSITION = sys.path.index(_FOLDER)

if sys.version_info < (3, 10):  # no release of the libraries that is repaired runs there
    del sys.path[_POSITION]
    del sys.modules["sitecustomize"]
    import sitecustomize
else:
    __import__("_gemma4_compat_hook")
    del sys.path[_POSITION]  # the program sees the path that it would have

    import _frozen_importlib as _importlib  # importlib would be more to import
    import _frozen_importlib_external as _files

    # Behind this folder only: what is before it is another tool's, which has come here from its own.
    _SPEC = _files.PathFinder.find_spec("sitecustomize", sys.path[_POSITION:])
    if _SPEC is None or _SPEC.loader is None:  # as without this file
        raise ImportError("No module named 'sitecustomize'", name="sitecustomize")
    _MODULE = _importlib.module_from_spec(_SPEC)
    sys.modules["sitecustomize"] = _MODULE
    _SPEC.loader.exec_module(_MODULE)
