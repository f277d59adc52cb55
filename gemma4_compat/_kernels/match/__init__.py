"""Custom numerics in place of PyTorch's: attention, products and top-k of a step, and attention of prompts."""

from __future__ import annotations
