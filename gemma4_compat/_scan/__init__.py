"""The command ``scan``: what a saved adapter is and what it would do on a base model.

* :mod:`job`: the scan. :mod:`result`, :mod:`text`: what it found.
* :mod:`configuration`, :mod:`lora_file`: what the adapter's two files say.
* :mod:`base`: the base's class and its linears. :mod:`comparison`: compares the adapter with them.
"""

from __future__ import annotations
