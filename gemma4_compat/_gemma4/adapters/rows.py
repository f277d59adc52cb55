"""``adapter_names``: PEFT's calls in which each row of the batch has an adapter of its own.

PEFT gives the names to every adapted layer, by hooks that last as long as the call. Here is what they lack: a name for
each row of what a layer really gets (beams, experts' tokens, the images of a row), in the thread of the call only.
Imports nothing upstream.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.models import media
from gemma4_compat._gemma4.models.family import is_gemma4

#: PEFT's name for a row without an adapter.
BASE = "__base__"
#: Modules that get the tokens of all rows in one dimension.
_OF_TOKENS = ("router", "experts")

_current: ContextVar[Call | None] = ContextVar("gemma4_compat_adapter_names", default=None)


class Names(list[str]):
    """The names of a call, as PEFT's hooks have them."""

    call: Call


class Call:
    """One call with ``adapter_names``, of ``forward`` or ``generate``.

    Attributes:
        names: one for each row that the caller passed.
        model: the Gemma 4 inside the PEFT model; None for another family.
        times: how often ``generate`` repeats each row.
        prompt: ``input_ids`` and ``inputs_embeds`` of the forward that runs, or else of ``generate``.
        alone: the adapter of all that runs now, if it is one.
    """

    def __init__(self, tuner: Any, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.names = Names(names)
        self.names.call = self
        self.model = tuner.model if is_gemma4(tuner.model) else None
        self.times = 1
        ids = next((kwargs[name] for name in ("input_ids", "inputs") if kwargs.get(name) is not None), None)
        self.prompt = (args[0] if args else ids, kwargs.get("inputs_embeds"))
        self.alone: str | None = None
        modules = () if self.model is None else self.model.named_modules()
        self._of_tokens = {id(module) for name, module in modules if not {*name.split(".")}.isdisjoint(_OF_TOKENS)}

    def read(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Before a forward of the model.

        Raises:
            ValueError: the batch has another number of rows than names.
        """
        if kwargs is None or _current.get() is not self:
            return  # another thread's
        self.prompt = (args[0] if args else kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        if (rows := self._rows()) is not None and len(self._repeated(rows)) != rows:
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(self.names)} and {rows} respectively."
            )

    def _rows(self) -> int | None:
        return next((len(given) for given in self.prompt if given is not None), None)

    def _repeated(self, rows: int) -> list[str]:
        """The names of the rows of a batch; the names as they are if they do not fit."""
        if len(self.names) * self.times == rows:
            return [name for name in self.names for _ in range(self.times)]
        return self.names

    def of(self, module: Any, args: tuple[Any, ...]) -> list[str]:
        """The names of what ``module`` gets as its first argument."""
        if not args or not hasattr(args[0], "shape"):
            return self.names
        if not args[0].shape:
            raise ValueError(
                "With `adapter_names`, a prompt in `inputs_embeds` cannot be searched for images: its adapters change "
                "the embeddings. Pass `input_ids`."
            )
        count = len(args[0])
        if self.alone is not None:
            return [self.alone] * count
        names = self._repeated(self._rows() or count)
        if id(module) in self._of_tokens and count % len(names) == 0:
            return [name for name in names for _ in range(count // len(names))]
        return names

    def owners(self, model: Any, kind: str, sizes: Sequence[int]) -> list[str]:
        """The adapter of each image, video frame or sound.

        Args:
            model: that encodes them.
            kind: of :data:`media.MEDIA`.
            sizes: the number of tokens of each.

        Raises:
            ValueError: they are not those of whole rows, or a repeated row has several adapters.
        """
        ids, embeds = self.prompt
        masks = model.get_placeholder_mask(ids, None if ids is not None else embeds)
        asked = masks[[name for name, _ in media.MEDIA].index(kind)].sum(-1).tolist()
        names = self._of_prompts(len(asked))
        found: list[str] = []
        ends = list(itertools.accumulate(sizes, initial=0))
        for name, end in zip(names, itertools.accumulate(asked)):
            while len(found) < len(sizes) and ends[len(found) + 1] <= end:
                found.append(name)
            if ends[len(found)] != end:
                break
        if len(found) != len(sizes) or ends[-1] != sum(asked):
            raise ValueError(
                f"With `adapter_names`, each {kind} belongs to one row. These have {list(sizes)} tokens, and the rows "
                f"have {asked} placeholders."
            )
        return found

    def check_padding(self, model: Any) -> None:
        """Before media are encoded: where they go, per-layer inputs come from the padding token's embedding.

        Raises:
            ValueError: it differs between adapters, and the model takes that of the active ones for all rows.
        """
        import torch

        embed, config = model.get_input_embeddings(), model.config.get_text_config()
        if not getattr(config, "hidden_size_per_layer_input", 0) or not hasattr(embed, "_adapters"):
            return
        padding, found = torch.full((1, 1), config.pad_token_id, device=embed.weight.device), []
        for name in dict.fromkeys([*self.names, *embed.active_adapters]):
            with alone(self, name):
                found.append(embed(padding))
        if any(not torch.equal(one, found[0]) for one in found):
            raise ValueError(
                "With `adapter_names`, images, videos and sounds need the same embedding of the padding token in all "
                "adapters. Pass the rows of each adapter by themselves."
            )

    def _of_prompts(self, rows: int) -> list[str]:
        names = self._repeated(rows)
        if len(names) == rows:
            return names
        groups = [{*names[index * len(names) // rows : (index + 1) * len(names) // rows]} for index in range(rows)]
        if len(names) % rows or any(len(group) != 1 for group in groups):
            raise ValueError(
                f"`adapter_names` has {len(names)} names for {rows} prompts with images, videos or sounds. Pass one "
                "for each prompt."
            )
        return [name for group in groups for name in group]


def current() -> Call | None:
    """The call that this thread is in."""
    return _current.get()


def entered(call: Call | None) -> contextlib.AbstractContextManager[None]:
    """Inside, this thread is in this call, or in none."""
    return in_place.bound(_current, call)


@contextlib.contextmanager
def alone(call: Call, name: str) -> Iterator[None]:
    """Inside, everything that the call runs has this one adapter."""
    before, call.alone = call.alone, name
    try:
        yield
    finally:
        call.alone = before


def by_adapter(
    call: Call,
    names: Sequence[str],
    run: Callable[[list[int]], Any],
    join: Callable[[list[Any], list[list[int]]], Any],
) -> Any:
    """What ``run`` returns for the places of each name, with only that adapter, joined.

    ``names`` has one for each item or token. ``join`` gets what ``run`` returned for each name, and the places.
    """
    places: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    found = []
    for name, own in places.items():
        with alone(call, name):
            found.append(run(own))
    return found[0] if len(found) == 1 else join(found, list(places.values()))


def joined(parts: Sequence[Any], places: Sequence[Sequence[int]]) -> Any:
    """A tensor whose rows ``places[i]`` are ``parts[i]``."""
    found = parts[0].new_empty((sum(map(len, places)), *parts[0].shape[1:]))
    for part, own in zip(parts, places):
        found[list(own)] = part
    return found
