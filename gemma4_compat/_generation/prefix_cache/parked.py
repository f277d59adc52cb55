"""Several conversations of one model: the last one where the model left it, the others in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gemma4_compat._gemma4.models import media
from gemma4_compat._generation.prefix_cache import session
from gemma4_compat._generation.prefix_cache.conversation import Conversation
from gemma4_compat._graphs import decoder

#: Conversations that are kept: each prompt is compared with all of them.
MOST = 64
#: Tokens: caches of shorter contexts are all as long as the context.
_ROOM = 4096


@dataclass
class _Known:
    """A conversation, who spoke (an adapter), and how many tokens its last prompt has."""

    adapter: str | None
    prompt: int
    conversation: Conversation


class Conversations:
    """Conversations that a model has after ``decode_fast(reuse_prefix=True)``, each continued by a next turn only.

    A prompt continues a conversation if it contains its last prompt and a part of the answer. What merely begins alike
    is read from the beginning, so a first turn has the same bits whatever others have asked.

    Args:
        model: a transformers model, which nobody else has.
        limit: bytes in host memory.
        context: tokens of a conversation at most.
    """

    def __init__(self, model: Any, limit: int, context: int = 0) -> None:
        self._model, self._limit = model, limit
        self._parked: list[_Known] = []
        self._last: tuple[str | None, int] = (None, 0)
        if (kept := session.of(model)) is not None:
            decoder.of(model).owned, kept.room = True, min(context, _ROOM)

    def turn_to(self, adapter: str | None, inputs: dict[str, Any]) -> None:
        """Before a ``generate`` of this prompt: have the model keep the conversation that it continues, or none."""
        kept = session.of(self._model)
        if kept is None:
            return
        ids = inputs["input_ids"][0].cpu()
        found = media.items(self._model, ids.tolist(), inputs) or []
        last = kept.take()
        known = [*self._parked, *([] if last is None else [_Known(*self._last, last)])]
        self._parked = []
        chosen, most = None, 0
        for one in known:
            common = one.conversation.common(ids, found) if one.adapter == adapter else 0
            if common > max(one.prompt, most):
                chosen, most = one, common
        self._park([one for one in known if one is not chosen])
        if chosen is not None and self._bring(chosen.conversation):
            kept.put(chosen.conversation)
        self._last = adapter, len(ids)

    def take(self) -> Conversation | None:
        """The conversation of the last prompt, which is the caller's then; None if it was not kept."""
        kept = session.of(self._model)
        return None if kept is None else kept.take()

    def add(self, adapter: str | None, prompt: int, conversation: Conversation) -> None:
        """Keep one that was taken, whose last prompt had so many tokens."""
        known, self._parked = [*self._parked, _Known(adapter, prompt, conversation)], []
        self._park(known)

    def _park(self, known: list[_Known]) -> None:
        """Keep these in host memory, as many of the last ones as have room."""
        left = self._limit
        for one in known[: -MOST - 1 : -1]:
            left -= one.conversation.nbytes
            if left < 0:
                break
            one.conversation.move_to_host()
            self._parked.insert(0, one)

    @staticmethod
    def _bring(conversation: Conversation) -> bool:
        """Have a conversation where the model can use it; False if there is no memory for it."""
        import torch

        try:
            conversation.move_back()
        except torch.OutOfMemoryError:
            return False
        return True

    def forget(self) -> None:
        """Release all of them."""
        self._parked = []
        kept = session.of(self._model)
        if kept is not None:
            kept.take()
