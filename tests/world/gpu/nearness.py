"""How near the gradients of several processes must be to those of one, and where the two begin to differ.

In float32 adapters the processes compute what one computes, in another order: nearly equal is asked for. In bf16 that
cannot be asked. A process that gets another kernel for one product rounds differently, and in a tiny random model that
moves the gradients, however many processes there are: by a few per cent for most prompts, by 20 for one in eight, and
those of single weights by more. What can be asked: rounding takes one process just as far from the gradients of an
arithmetic that is in float32, all of it, and nobody is much farther.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

Training = dict[str, Any]
Steps = dict[str, list[float]]

#: How much farther from the truth than the farthest of one process's ways in bf16: the loss, all gradients together,
#: those of one weight.
MARGIN = {"losses": 1.5, "gradients": 1.5, "weight": 4.0}
#: FSDP2 rounds its loss, so that much is always allowed.
ROUNDING = 2.0**-7
#: A way that is wrong must be this much farther than the bound, so that the bound can tell.
TOLD = 2.0


def distance(found: Training, reference: Training) -> Steps:
    """For each step the relative difference of the losses, of all gradients together (2-norm), and of those of the
    adapter weight that differ most.
    """
    gradients, worst = [], []
    for own, right in zip(found["gradients"], reference["gradients"], strict=True):
        assert own.keys() == right.keys()
        off = [float((own[name] - right[name]).norm()) for name in right]
        gradients.append(math.hypot(*off) / math.hypot(*(float(value.norm()) for value in right.values())))
        worst.append(max(by_weight(own, right).values()))
    losses = [abs(a / b - 1) for a, b in zip(found["losses"], reference["losses"], strict=True)]
    return {"losses": losses, "gradients": gradients, "worst": worst}


def among(ways: dict[str, Training]) -> Steps:
    """How far the ways of one process in float32 are from each other."""
    pairs = [distance(one, other) for one, other in itertools.permutations(ways.values(), 2)]
    return {
        what: [max(*values, 2.0**-23) for values in zip(*(pair[what] for pair in pairs), strict=True)]
        for what in ("losses", "gradients", "worst")
    }


def beyond(found: Training, ways: dict[str, Training], limit: Steps) -> list[str]:
    """What of ``found`` is farther than ``limit`` from the nearest of ``ways``."""
    distances = [distance(found, way) for way in ways.values()]
    return [
        f"step {number}: {what} {nearest:.3g}, at most {allowed:.3g}"
        for what in limit
        for number, allowed in enumerate(limit[what])
        if not (nearest := min(each[what][number] for each in distances)) <= allowed  # NaN is beyond everything
    ]


class InBf16:
    """How far from ``ways["truth"]`` a training in bf16 may be: as far as the other ways of one process, and more.

    Eager attention is left out: it is another kernel, and shows that such a one is within the bound.
    """

    def __init__(self, ways: dict[str, Training]) -> None:
        self.truth = ways["truth"]
        noisy = {name: way for name, way in ways.items() if name not in ("eager", "truth", "alone")}
        #: Of each way.
        self.away = {name: distance(way, self.truth) for name, way in ways.items() if name != "truth"}
        self.limit = {
            what: [
                MARGIN[what] * max(*values, ROUNDING)
                for values in zip(*(self.away[name][what] for name in noisy), strict=True)
            ]
            for what in ("losses", "gradients")
        }
        #: Of each weight, in each step.
        self.weights = [
            {name: max(each[name], ROUNDING) for name in each} for each in map(_largest, self._steps(noisy.values()))
        ]

    def _steps(self, trainings: Iterable[Training]) -> list[list[dict[str, float]]]:
        """For each step, and each training, how far the gradient of each weight is."""
        found = [each["gradients"] for each in trainings]
        return [
            [by_weight(step, right) for step in steps]
            for steps, right in zip(zip(*found, strict=True), self.truth["gradients"], strict=True)
        ]

    def beyond(self, found: Training) -> list[str]:
        """What of ``found`` is too far from the truth."""
        said = beyond(found, {"truth": self.truth}, self.limit)
        for number, ((off,), noise) in enumerate(zip(self._steps([found]), self.weights, strict=True)):
            for name, value in off.items():
                if not value <= MARGIN["weight"] * noise[name]:
                    said.append(f"step {number}: {name} {value:.3g}, at most {MARGIN['weight'] * noise[name]:.3g}")
        return said


def _largest(off: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in off) for name in off[0]}


def by_weight(gradients: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """The relative difference of each weight's gradient."""
    return {name: float((gradients[name] - right[name]).norm() / right[name].norm()) for name in right}


def farthest(found: Training, reference: Training, count: int = 5) -> list[tuple[str, float, float]]:
    """The weights whose gradients of the first step differ most: name, relative difference, share of all norms."""
    own, right = found["gradients"][0], reference["gradients"][0]
    whole = math.hypot(*(float(value.norm()) for value in right.values()))
    sizes = {name: float(value.norm()) for name, value in right.items()}
    off = by_weight(own, right)
    return [(name, off[name], sizes[name] / whole) for name in sorted(off, key=lambda name: -off[name])[:count]]


def first_difference(found: list[dict[str, Any]], reference: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first module whose output in the first forward is not the same bits; None: there is none.

    Each list is what ``trainings.Calls`` kept. With the same input and the same weights it is another kernel; with
    another input something that is no module (attention) was computed otherwise; with other weights they were gathered
    wrongly. A module that is called for each kind of layer is called in any order, hence the shapes.
    """
    import torch

    expected: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for right in reference:
        expected.setdefault((right["module"], right["output"].shape), []).append(right)
    assert len(found) == len(reference)
    for own in found:
        right = expected[own["module"], own["output"].shape].pop(0)
        if torch.equal(own["output"], right["output"]) and own["output"].dtype == right["output"].dtype:
            continue
        exact = right["output"].double()
        return {
            "module": own["module"],
            "type": own["type"],
            "same input": own["input"] == right["input"],
            "same weights": own["weights"] == right["weights"],
            "dtypes": sorted({str(own["output"].dtype), str(right["output"].dtype)}),
            "differs by": float((own["output"].double() - exact).norm() / exact.norm()),
            "addresses": [own["addresses"], right["addresses"]],
        }
    return None
