"""Whether a model is still what it was when something was computed that is to be used again.

Called by :mod:`decoder` for steps, by prompts and drafts through it, by ``_training/captured`` for layers, and by
``_generation/prefix_cache`` for keys and values. ``tests/one_device/guards.py`` is the table of what is noticed.

* :mod:`model`: :class:`ModelGuards`. What it compares: :mod:`gemma4_compat._gemma4.state.snapshots`.
* :mod:`stored`: the values of offloaded weights; of others: :mod:`gemma4_compat._gemma4.state.contents`.
* :mod:`digests`: the number for the values of weights on devices, recorded as one launch.
* :mod:`torch_hooks`: the hooks of modules.
"""

from __future__ import annotations
