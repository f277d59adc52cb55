"""Equal decoder layers of a step on tensors without memory: some of each kind run, the others are added up.

Layers are of the same kind if their modules have the same settings and their weights the same shapes. Each layer of a
kind then adds the same number of bytes to a step, and needs the same number while it runs: once in the forward pass,
and once in the backward pass. The first one and the last one of a kind may differ: they make, or release, what all of
them share. So the first two and the last two run. The others hand on their input, and are counted like the second one
in the forward pass and like the last but one in the backward pass. If those two were not alike, all layers run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any


class Tally:
    """What each layer of a step adds to its memory.

    Args:
        kinds: of the layers, in order.
        counter: :func:`gemma4_compat._plan.training_step.storage_counter`'s.

    Attributes:
        skipped: the layers that do not run.
    """

    def __init__(self, kinds: Iterable[Any], counter: Any) -> None:
        places: dict[Any, list[int]] = {}
        for place, kind in enumerate(kinds):
            places.setdefault(kind, []).append(place)
        # By layer that does not run: those that it is counted like, in the forward and in the backward pass.
        self._like = {
            place: (found[1], found[-2]) for found in places.values() if len(found) > 4 for place in found[2:-2]
        }
        self.skipped: Collection[int] = self._like.keys()
        self._after_two = frozenset(place for found in places.values() for place in found[2:])
        self._counter, self._counts = counter, True
        self._found: dict[tuple[int, bool], tuple[int, int]] = {}  # by layer and pass: bytes added, and needed
        self._copies: dict[int, int] = {}  # by layer: bytes that autocast keeps until it is over
        self._current: tuple[int, bool] | None = None
        self._before = 0

    def begin(self, place: int, *, backward: bool) -> None:
        """A layer begins: the one before it is over."""
        if not self._counts:
            return
        self._end()
        self._current, self._before = (place, backward), self._counter.now
        self._counter.high, self._counter.owner = self._counter.now, self._current

    def skip(self, place: int, *, backward: bool) -> None:
        """Count a layer that does not run."""
        if not self._counts:
            return
        self._end()
        self._counter.add(*self._found[self._like[place][backward], backward])

    def loss_is_there(self) -> None:
        """The forward pass is over. Autocast is not: it has copies of the trained weights."""
        self._end()
        self._copies = {place: self._counter.owned[place, False] for pair in self._like.values() for place in pair}

    def autocast_is_over(self) -> None:
        """Count the copies of layers that do not run as released."""
        self._copies = {place: held - self._counter.owned[place, False] for place, held in self._copies.items()}
        self._counter.add(-sum(self._copies[first] for first, _ in self._like.values()), 0)

    def holds(self) -> bool:
        """Whether the layers before and after those of a kind that did not run were alike."""
        return all(self._took(first) == self._took(last) for first, last in self._like.values())

    def stop(self) -> None:
        """Count nothing from now on: two layers of each kind are enough."""
        self.skipped, self._counts = self._after_two, False

    def _took(self, place: int) -> Any:
        return self._found[place, False], self._found[place, True], self._copies[place]

    def _end(self) -> None:
        if self._current is not None:
            self._found[self._current] = self._counter.now - self._before, self._counter.high - self._before
            self._current = self._counter.owner = None


@contextlib.contextmanager
def few(layers: Any, counter: Any, *, every: bool = False) -> Iterator[Tally]:
    """Inside, some layers of each kind run.

    Args:
        layers: the decoder layers, an ``nn.ModuleList``.
        counter: as for :class:`Tally`.
        every: all layers run.
    """
    originals = list(layers)
    tally = Tally(range(len(originals)) if every else map(_kind, originals), counter)
    try:
        for place, layer in enumerate(originals):
            layers[place] = _watched(layer, place, tally)
        yield tally
    finally:
        for place, layer in enumerate(originals):
            layers[place] = layer


def _kind(layer: Any) -> Any:
    """What equal layers have in common."""
    weights = tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in layer.named_parameters())
    return weights, tuple((name, type(module), _settings(module)) for name, module in layer.named_modules())


def _settings(module: Any) -> Any:
    """All but where the module is."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    return tuple(sorted((name, value) for name, value in found.items() if name != "layer_idx"))


def _watched(layer: Any, place: int, tally: Tally) -> Any:
    """Stands in for a layer: tells the tally when it begins, or hands on its input."""
    import torch

    class Skipped(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_ctx: Any, states: Any) -> Any:
            tally.skip(place, backward=False)
            return states.view_as(states)

        @staticmethod
        def backward(_ctx: Any, gradient: Any) -> Any:
            tally.skip(place, backward=True)
            return gradient

    class Watched(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            if place not in tally.skipped:  # nobody finds a layer that never runs
                self.layer = layer

        def forward(self, states: Any, *args: Any, **kwargs: Any) -> Any:
            if place in tally.skipped:
                return Skipped.apply(states)
            tally.begin(place, backward=False)
            output = self.layer(states, *args, **kwargs)
            output.register_hook(lambda _gradient: tally.begin(place, backward=True))
            return output

        def __getattr__(self, name: str) -> Any:
            modules = vars(self)["_modules"]
            return modules[name] if name in modules else getattr(layer, name)

    return Watched()
