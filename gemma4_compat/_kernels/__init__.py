"""Custom CUDA kernels: their text, compiled by NVRTC, tried against PyTorch, launched.

* :mod:`cuda`: the kernels. :mod:`specs`: what each one computes. :mod:`programs`: what is compiled together.
* :mod:`compiling`: NVRTC. :mod:`kernel_files`: what it compiled, on disk. :mod:`launching`: CUDA's driver.
* :mod:`card_memory`: memory that is given back and taken again at its address.
* :mod:`kernels`: compiles what a graph needs, tries it once, and launches it. :mod:`noted`: what steps needed,
  on disk.
* :mod:`match`: which operations of a model they replace. :mod:`fuse`: several operations as one kernel.
"""

from __future__ import annotations
