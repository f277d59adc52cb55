"""How a token is chosen.

:mod:`fast_processors`: transformers' processors and criteria, called faster. :mod:`sampling_noise`: what tokens are
drawn with. :mod:`stopping`: where a text ends. :mod:`best_words`: which words matter, and a head that computes only
these.
"""

from __future__ import annotations
