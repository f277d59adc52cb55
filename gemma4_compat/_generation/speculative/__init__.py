"""Texts with an assistant model or prompt lookup.

:mod:`assisted` runs them, :mod:`drafted_calls` says which. :mod:`speculative_steps`: drafts, and the forward that
reads them. :mod:`draft_windows`: where its sliding layers keep their rows. :mod:`draft_length`: how many drafts.
:mod:`lookup`: drafts from the text itself.
"""

from __future__ import annotations
