"""The command ``needed``: which patches the pins of a project still need.

* :mod:`files`: the files with pins. :mod:`requested`, :mod:`state`: what they say about a library.
* :mod:`ranges`: specifiers as ranges. :mod:`judge`: the verdict for each patch. :mod:`report`: text and JSON.
"""

from __future__ import annotations
