"""Simpler sequences that may fail in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tests.generated.search import case as cases
from tests.generated.search.case import OFFLOADED, Case, is_complete
from tests.generated.search.sequence import Operation, Sequence, operation

#: Operations that only look at the model.
SHOWING = ("forward", "generate", "turns")
#: The plainest value of an option; None leaves it out.
PLAIN: dict[str, Any] = {
    "attentions": None, "autocast": None, "gradients": None, "embeddings": None, "batch": None, "prompt": "text",
    "trainable": False, "checkpointing": "none", "accumulate": 1, "turns": 2, "layer": 0, "how": "float",
    "tokens": 272, "mean": False, "what": "all", "assign": False, "where": "layer", "combination": "linear",
    "saved": False, "keep": "copy", "static": None,
}  # fmt: skip
#: The same, where an option of that name means something else in each operation.
PLAIN_HERE: dict[tuple[str, str], Any] = {
    ("generate", "mode"): "greedy",
    ("train", "mode"): "eval",
    ("train", "autocast"): "none",
    ("prepare_for_training", "checkpointing"): False,
    ("load_adapter", "kind"): "text",
    ("new_adapter", "kind"): "text",
    ("load_adapter", "number"): 0,
    ("load_adapter", "way"): "peft",
    ("hotswap", "number"): 1,
    ("threads", "number"): 2,
}


def simplifications(sequence: Sequence) -> Iterator[Sequence]:
    """Shorter sequences first, then plainer operations, then a simpler model."""
    steps = sequence.operations
    changing = tuple(step for step in steps[:-1] if step.name not in SHOWING)
    if len(changing) + 1 < len(steps):
        yield Sequence(case=sequence.case, operations=(*changing, steps[-1]))
    for length in sorted({max(len(steps) // 2, 1), 2, 1}, reverse=True):
        for start in range(0, len(steps), length):
            if length < len(steps):
                yield Sequence(case=sequence.case, operations=(*steps[:start], *steps[start + length :]))
    for index, step in enumerate(steps):
        for plainer in _plainer(step, sequence.case):
            yield Sequence(case=sequence.case, operations=(*steps[:index], plainer, *steps[index + 1 :]))
    for simpler in cases.simplifications(sequence.case):
        towers = simpler.vision or simpler.audio
        if not is_complete(simpler):
            continue
        fitted = tuple(_fitted(step, simpler, towers) for step in steps)
        if all(step is not None for step in fitted):
            yield Sequence(case=simpler, operations=tuple(step for step in fitted if step is not None))


def _not_plain(step: Operation) -> dict[str, Any]:
    """The plainest values of the options that have another one."""
    plain = {key: PLAIN_HERE.get((step.name, key), PLAIN.get(key, value)) for key, value in step.options}
    return {key: plain[key] for key, value in step.options if plain[key] != value}


def _plainer(step: Operation, case: Case) -> Iterator[Operation]:
    options = dict(step.options)
    for key, plain in _not_plain(step).items():
        changed = {**options, key: plain}
        yield operation(step.name, **{name: value for name, value in changed.items() if value is not None})
    if "placement" in options:
        for simpler in cases.simpler_maps(dataclasses.replace(case, placement=options["placement"])):
            if is_complete(dataclasses.replace(case, placement=simpler)):
                yield operation(step.name, **{**options, "placement": simpler})


def _fitted(step: Operation, case: Case, towers: bool) -> Operation | None:
    """The operation for a simpler model; None where it has no meaning there."""
    options = dict(step.options)
    if not towers:
        if options.get("kind") in ("towers", "both"):
            return None
        if "prompt" in options:
            options["prompt"] = "text"
    if "layer" in options:
        options["layer"] = min(options["layer"], case.layers - 1)
    if "placement" in options:
        names = {node.name for node in cases.walk(cases.tree(case))}
        inner = options["placement"]
        if case.model == "causal":
            inner = tuple((name.replace("model.language_model", "model"), place) for name, place in inner)
        options["placement"] = tuple(item for item in dict(inner).items() if item[0] in names)
        if not is_complete(dataclasses.replace(case, placement=options["placement"])):
            return None
    return operation(step.name, **options)


def size(sequence: Sequence) -> tuple[int, ...]:
    """What shrinking makes smaller, most important first; it only ever steps down, so it ends."""
    steps = sequence.operations
    maps = [dict(step.options).get("placement", ()) for step in steps]
    return (
        len(steps),
        *cases.size(sequence.case),
        sum(len(_not_plain(step)) for step in steps),
        sum(map(len, maps)),
        sum(place == OFFLOADED for placement in maps for _, place in placement),
    )
