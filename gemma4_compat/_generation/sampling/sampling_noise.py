"""What tokens are drawn with where drafts may be wrong: a row of random numbers for each place of the text."""

from __future__ import annotations

from typing import Any

from gemma4_compat._graphs import deferred_stop


class Noise:
    """Exponentially distributed numbers, a row for each new token, as ``torch.multinomial`` draws them for one token.

    Args:
        device: ``torch.device`` of the rows.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._generator = deferred_stop.generator_of(device)
        self._rows: list[tuple[Any, Any]] = []  # each with the generator's state after it
        self._state: Any = None  # after the last row that was used

    def rows(self, vocabulary: int, tokens: int) -> Any:
        """Those of the next tokens of the text, (tokens, vocabulary), float32."""
        import torch

        while len(self._rows) < tokens:
            row = torch.empty((1, vocabulary), device=self._device).exponential_()
            self._rows.append((row, self._generator.get_state()))
        return torch.cat([row for row, _ in self._rows[:tokens]])

    def rows_after(self, most: int, grown: Any, vocabulary: int, tokens: int) -> Any:
        """As :meth:`rows`, after tokens that the host has not read.

        Args:
            most: so many at most.
            grown: so many, an integer tensor of no dimension.
            vocabulary: numbers of a row.
            tokens: rows of the result.
        """
        import torch

        found = self.rows(vocabulary, most + tokens)
        return found[most:] if most == 1 else found.index_select(0, grown + torch.arange(tokens, device=self._device))

    def use(self, tokens: int) -> None:
        """The text has grown."""
        self._state = self._rows[tokens - 1][1]
        del self._rows[:tokens]

    def finish(self) -> None:
        """The text has ended: as if nothing had been drawn for tokens that never came."""
        if self._state is not None:
            self._generator.set_state(self._state)
