"""What accelerate put on a model: its hooks, and the device maps it takes.

* :mod:`device_maps`: which entry of a map holds a tensor, and what a map misses.
* :mod:`module_hooks`: where a module computes, and whether its weights are offloaded.
* :mod:`hooked`: patches that sleep until a module gets its first hook.
"""
