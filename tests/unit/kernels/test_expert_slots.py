"""Which experts stay in the slots of the card: those used last; and what is copied there has the host's bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.specs import expert_slots

CPU = torch.device("cpu")
ROWS = (64, 40, 12, 5)  # bytes


class Reference:
    """The least recently used slot goes first, of equal ones the first slot; those of this step stay."""

    def __init__(self, held: int) -> None:
        self.inside: list[int | None] = [None] * held
        self.used = [-1] * held
        self.step, self.counts = -1, [0, 0]

    def bring(self, chosen: list[int]) -> list[int]:
        self.step += 1
        new = [one for one in dict.fromkeys(chosen) if one not in self.inside]
        self.counts[0] += len(set(chosen)) - len(new)
        self.counts[1] += len(new)
        for one in set(chosen) - set(new):
            self.used[self.inside.index(one)] = self.step
        for one in new:
            slot = min(range(len(self.used)), key=lambda slot: (self.used[slot], slot))
            self.inside[slot], self.used[slot] = one, self.step
        return [self.inside.index(one) for one in chosen]


def drawn(experts: int, most: int, steps: int, locality: float) -> Iterator[list[int]]:
    """Indices, some of them twice, that repeat those of the step before as often as ``locality`` says."""
    numbers, before = random.Random(0), [0]
    for _ in range(steps):
        count = numbers.randint(1, most)
        before = [
            numbers.choice(before) if numbers.random() < locality else numbers.randrange(experts) for _ in range(count)
        ]
        yield before


@pytest.mark.parametrize(
    ("experts", "held", "most"), [(7, 1, 1), (16, 4, 4), (128, 32, 8), (40, 40, 40), (300, 150, 140)]
)
def test_the_least_recently_used_go_first(on_host: kernels.Kernels, experts: int, held: int, most: int) -> None:
    places = [sum(-(-row * experts // 16) * 16 for row in ROWS[:k]) for k in range(len(ROWS) + 1)]
    memory = torch.randint(0, 256, (places[-1],), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    slots, counts = torch.zeros_like(memory), torch.zeros(2, dtype=torch.int64)
    state = torch.full((expert_slots.state_size(experts, held),), -1, dtype=torch.int32)
    layout = torch.tensor([(place, place, row) for place, row in zip(places, ROWS)])
    reference = Reference(held)
    for number, chosen in enumerate(drawn(experts, most, 60, 0.5)):
        if number == 40:
            state.fill_(-1)
            counts.zero_()
            reference = Reference(held)
        given = torch.tensor(chosen)
        launched, into = expert_slots.kernels(given, memory, layout, slots, state, counts, (experts, held))
        on_host.prepare([one.text for one in launched], [])
        for one in launched:
            on_host.launch(one)
        assert into.tolist() == reference.bring(chosen)
        assert counts.tolist() == reference.counts
        for place, row in zip(places, ROWS):
            there = memory[place : place + experts * row].view(experts, row)
            here = slots[place : place + held * row].view(held, row)
            assert torch.equal(here[into], there[given])
    assert min(reference.counts) > 0 or held == 1


def test_the_trial(on_host: kernels.Kernels, change_file: Callable[[str, str, str], None]) -> None:
    assert custom.brings_experts(CPU)
    kernels._kernels.pop(CPU)
    change_file("expert_slots.cuh", "slot_of[before] = -1;", ";")
    assert not custom.brings_experts(CPU)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, on_host: Any) -> None:
    monkeypatch.setattr(kernels.COMPILERS["cpu"], "unsupported_reason", staticmethod(lambda: "no g++"))
    assert not custom.brings_experts(CPU)
