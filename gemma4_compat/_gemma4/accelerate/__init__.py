"""What hangs on a model: accelerate's hooks and device maps, and what this package leaves there.

* :mod:`attached`: all of the latter, declared once. :mod:`listing`: shows it for one model.
* :mod:`device_maps`: which entry of a map holds a tensor, and what a map misses.
* :mod:`module_hooks`: where a module computes, and whether its weights are offloaded.
* :mod:`hooked`: patches that are dormant until a module gets its first hook.
"""

from __future__ import annotations
