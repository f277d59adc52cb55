"""What any program needs, and nothing about Gemma 4 or patches.

* :mod:`files`, :mod:`json_files`, :mod:`toml`, :mod:`formats`: files of users, read within bounds. :mod:`project`: the
  table in their pyproject.toml. :mod:`temporary`: folders for one process.
* :mod:`patterns`: regular expressions of configurations, tried where they can be stopped.
* :mod:`terminal`, :mod:`text`: what a command prints. :mod:`notice`: warnings that point at the user's line.
* :mod:`arguments`: what is not a model, a path or an id. :mod:`bits`: tensors that are bitwise equal.
* :mod:`shadowed`: a ``torch.py`` of the user's own. :mod:`address`: where this project lives.
"""

from __future__ import annotations
