"""Prompts as graphs.

* :mod:`prompts`: prompts of one length. :mod:`embedded`: those with images or sounds. :mod:`buckets`: prompts of any
  length by graphs of a few sizes.
* :mod:`chunks`: how many tokens fit at a time, and prompts that are read so.
* :mod:`overflow`: prompts whose logits are not numbers in float16; ``transformers_fp16_logits`` says so.
"""

from __future__ import annotations
