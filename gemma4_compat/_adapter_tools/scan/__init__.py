"""The command ``scan``: what a saved adapter is and what it would do on a base model.

* :mod:`job`: the scan. :mod:`result`, :mod:`text`: what it found.
* :mod:`configuration`, :mod:`lora_file`: what the adapter's two files say.
* :mod:`comparison`: compares the adapter with a base.
"""

from __future__ import annotations
