"""Help for a user: what is broken here, and which patch an error belongs to.

* ``doctor`` runs the reproductions: :mod:`diagnosis`, :mod:`findings`, :mod:`children`, :mod:`server`, :mod:`child`,
  :mod:`text`. ``doctor --show`` asks the trained model: :mod:`show`, :mod:`scenes`.
* ``explain`` searches the patches for an error: :mod:`search`, :mod:`places`, :mod:`answers`, :mod:`messages`,
  :mod:`explanation`; :mod:`common_errors` has those that no patch is about.
* ``reproduce`` prints a script: :mod:`script`. ``env`` describes the machine: :mod:`environment`.
* :mod:`imports`: a library that is missing or does not match torch.
"""

from __future__ import annotations
