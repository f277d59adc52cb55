"""What transformers collects of the forward that this thread is in: ``output_attentions`` and the like."""

from __future__ import annotations

from collections.abc import Collection

MODULE = "transformers.utils.output_capturing"


def collected() -> Collection[str]:
    """The names of what is collected, as ``attentions``; none outside of a forward. Needs the loaded transformers."""
    from transformers.utils import output_capturing

    return output_capturing._active_collector.get() or ()
