"""``gemma4-compat check``: whether the same weights give the same answers on this machine, wherever they are.

Called by ``cli/check.py``, which imports no library: everything that computes runs in child processes.

* :mod:`run`: starts the children one after the other, with time limits, and collects what they say.
* :mod:`child`: a child; it says each step and its result as a line of JSON. :mod:`errors`: a crash as data.
* :mod:`survey`: the first child: machine, model, placements. :mod:`machine`, :mod:`placements`: its parts.
* :mod:`case`: the other children: one placement each. :mod:`prompts`, :mod:`answers`, :mod:`speeds`: its parts.
* :mod:`merged`: the child that merges the adapter.
* :mod:`report`: what was found as data without anything personal, and the verdict. :mod:`text`: the same for a reader.
"""

from __future__ import annotations
