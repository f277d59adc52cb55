"""How a token is chosen.

:mod:`choosing`: transformers' processors and criteria, called faster. :mod:`noise`: what tokens are drawn with.
:mod:`ends`: where a text ends.
"""

from __future__ import annotations
