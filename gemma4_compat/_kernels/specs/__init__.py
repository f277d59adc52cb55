"""Kernels: which launch, from which CUDA C, for which tensors."""

from __future__ import annotations
