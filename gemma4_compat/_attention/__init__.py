"""Masks, kernels, and what attention makes of a query that sees no key.

* :mod:`attention_lookup`: where a layer looks its attention function up. :mod:`flash`: heads too wide for flash
  kernels.
* :mod:`masks`: prompts with images. :mod:`unseen_keys`: queries that see no key, as padding gives them.
"""
