"""Random sequences of operations: on a split model each shows what it shows on one device, or is refused.

``python -m tests.generated.search --sequences`` runs more of them. A failing sequence is shrunk here and shown as a
row for ``tests/generated/search/regressions.json``.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from tests.generated.search import pool, regressions, sequences_cli, sequences_run
from tests.generated.search.case import GROUP, MAIN, OFFLOADED, Case, is_complete
from tests.generated.search.operations import OPERATIONS
from tests.generated.search.sequence import Operation, Sequence, operation
from tests.generated.search.sequence_rules import KINDS, generate
from tests.generated.search.sequence_shrinking import simplifications, size

#: Sequences in which every operation is drawn three times and more.
SEEDS = range(3380, 3480)
#: Of the fast suite.
FEW = SEEDS[::10]
#: Of the run with nothing split.
ONE_DEVICE = SEEDS[::4]
#: A seed for each patch that makes a difference on one device.
DIFFERENT = {
    "bitsandbytes-cpu-packing": 49,
    "bitsandbytes-cpu-strides": 20,
    "peft-adalora-ranks": 28,
    "peft-kbit-dtypes": 265,
    "transformers-quantized-router": 33,
    "transformers-reentrant-checkpointing": 167,
    "transformers-sliding-cache": 17,
}
#: In calls that no sequence makes: eager attention, a cast to the dtype that a model has, static caches with images.
#: The differential search makes them.
NOT_DRAWN = {
    "peft-adapter-names",
    "peft-frozen-adapters",
    "transformers-accumulation-weights",
    "transformers-adapter-names",
    "transformers-attention-weights",
    "transformers-audio-mask",
    "transformers-image-masks-unified",
    "transformers-image-types",
    "transformers-packed-texts",
    "transformers-rotary-cast",
    "transformers-static-images",
    "transformers-vision-masks",
}
#: How many sequences may be tried to shrink a failure here; the command in the message has more patience.
ATTEMPTS = 30

NEEDS = "needs the upstream libraries: pip install 'gemma4-compat[test]'"


@pytest.fixture
def bench() -> Iterator[sequences_run.SequenceBench]:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    with sequences_run.bench() as place:
        yield place


def hold(seeds: Any, bench: sequences_run.SequenceBench, check: Any = sequences_run.check, mode: str = "") -> None:
    """Run the sequences; a failure is shrunk."""
    found = {seed: check(generate(seed), bench) for seed in seeds}
    failing = {seed: outcome.failure for seed, outcome in found.items() if outcome.failure is not None}
    if failing:
        seed, failure = next(iter(failing.items()))
        shrunk = sequences_run.shrink(generate(seed), failure, bench, attempts=ATTEMPTS, check=check)
        lines = [f"seed {number}: {wrong.signature}" for number, wrong in failing.items()]
        repeat = f"repeat one: python -m tests.generated.search --sequences{mode} --cases 1 --seed {seed}"
        row = regressions.row(shrunk, f"seed-{seed}", f"Seed {seed}: {failure.signature}")
        pytest.fail("\n".join([*lines, repeat, "", failure.detail, "", row]), pytrace=False)


@pytest.mark.parametrize("seed", FEW)
def test_a_few_sequences_show_what_one_device_shows(seed: int, bench: sequences_run.SequenceBench) -> None:
    hold([seed], bench)


@pytest.mark.full
@pytest.mark.parametrize(
    "seeds",
    [SEEDS[start : start + GROUP] for start in range(0, len(SEEDS), GROUP)],
    ids=lambda seeds: f"seeds-{seeds[0]}-{seeds[-1]}",
)
def test_every_sequence_shows_what_one_device_shows(seeds: range, bench: sequences_run.SequenceBench) -> None:
    hold(seeds, bench)


@pytest.mark.full
@pytest.mark.parametrize("start", ONE_DEVICE[:4])
def test_a_model_on_one_device_is_left_alone(start: int, bench: sequences_run.SequenceBench) -> None:
    hold(range(start, ONE_DEVICE.stop, 16), bench, sequences_run.check_one_device, " --one-device")


# What the search would not find, it does not show. So: it covers what it says, and it sees what is planted.


def test_the_sequences_cover_every_operation_and_every_kind_of_adapter() -> None:
    sequences = [generate(seed) for seed in SEEDS]
    counts = sequences_cli.counted(sequences)
    assert counts["operations"].keys() == OPERATIONS.keys()
    assert counts["adapters"].keys() == set(KINDS)
    assert counts["quantization"].keys() == {"None", "4bit", "4bit-double", "8bit"}
    assert counts["offloaded_to"].keys() == {"cpu", "disk"}
    assert counts["load"].keys() == {"from_pretrained", "dispatch_model"}
    assert counts["offloaded"].keys() == {"embed_tokens", "lm_head", "layers", "_tower"}
    few = {name: number for name, number in counts["operations"].items() if number < 3}
    assert not few
    values = collections.defaultdict(set)
    for step in (step for sequence in sequences for step in sequence.operations):
        for key, value in step.options:
            values[step.name, key].add(value)
    assert values["train", "checkpointing"] == {"none", "reentrant", "not reentrant"}
    assert values["generate", "mode"] == {"greedy", "sample", "beams"}
    assert values["generate", "static"] == {False, True}
    assert values["load_adapter", "way"] == {"peft", "transformers"}


def test_a_seed_is_one_sequence_for_ever_and_survives_json() -> None:
    for seed in SEEDS:
        sequence = generate(seed)
        assert sequence == generate(seed)
        assert Sequence.from_json(sequence.to_json()) == sequence
        assert is_complete(sequence.case)
        assert OFFLOADED in dict(sequence.case.placement).values()
        assert all(step.name in OPERATIONS for step in sequence.operations)


def test_simpler_sequences_are_smaller_and_end() -> None:
    for seed in range(0, 60, 7):
        sequence, steps = generate(seed), 0
        while smaller := [s for s in simplifications(sequence) if size(s) < size(sequence)]:
            sequence, steps = smaller[0], steps + 1
            assert steps < 500
        assert len(sequence.operations) == 1
        assert sequence.case.layers == 2


SPLIT = Sequence(
    case=Case(
        model="causal",
        layers=4,
        per_layer=True,
        kv_shared=1,
        placement=(("", MAIN), ("model.layers.0", OFFLOADED), ("model.layers.2.mlp", OFFLOADED)),
    ),
    operations=(
        operation("load_adapter", adapter="a", kind="text", number=0, trainable=True, way="peft"),
        operation("forward", prompt="text"),
        operation("change_weight", layer=1),
        operation("generate", mode="sample", prompt="text"),
        operation("set_adapter", adapter="a"),
        operation("forward", prompt="text", attentions=True),
    ),
)


def test_the_planted_sequence_is_good_without_a_defect(bench: sequences_run.SequenceBench) -> None:
    outcome = sequences_run.check(SPLIT, bench)
    assert outcome == sequences_run.Outcome(operations=len(SPLIT.operations))


def later_weights(world: Any, step: Operation) -> None:
    """One weight changes with an operation that should change none."""
    import torch

    if step.name == "set_adapter":
        with torch.no_grad():
            world.text.norm.weight[3] += 0.25


def breaks(world: Any, step: Operation) -> None:
    if step.name == "change_weight":
        del world.text.norm


@pytest.mark.parametrize(
    "tamper, signature, left",
    [
        pytest.param(*(later_weights, "forward: logits differs", ["set_adapter", "forward"]), marks=pytest.mark.full),
        (breaks, "generate: AttributeError", ["change_weight", "generate"]),
    ],
)
def test_a_planted_defect_is_found_and_shrunk(
    bench: sequences_run.SequenceBench, tamper: Any, signature: str, left: list[str]
) -> None:
    failure = sequences_run.check(SPLIT, bench, tamper=tamper).failure
    assert failure is not None
    assert failure.signature.startswith(signature)
    shrunk = sequences_run.shrink(SPLIT, failure, bench, attempts=80, tamper=tamper)
    names = [step.name for step in shrunk.operations]
    assert names[-2:] == left
    assert len(names) <= 3, "set_adapter needs an adapter"
    assert shrunk.case.layers == 2
    assert not shrunk.case.per_layer
    again = sequences_run.check(shrunk, bench, tamper=tamper).failure
    assert again is not None
    assert again.signature == failure.signature
    row = json.loads(regressions.row(shrunk, "planted", failure.signature))
    assert (row["id"], regressions.parsed(row)) == ("planted", shrunk)


def with_operation(monkeypatch: pytest.MonkeyPatch, function: Any) -> Sequence:
    """A sequence with an operation of the test's own, between two forwards."""
    monkeypatch.setitem(OPERATIONS, "own", function)
    forward = operation("forward", prompt="text")
    return dataclasses.replace(SPLIT, operations=(forward, operation("own"), forward))


def test_a_refusal_before_anything_is_changed_is_no_failure(
    bench: sequences_run.SequenceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(world: Any) -> None:
        if world.split:
            raise Gemma4CompatError("not on a split model")
        later_weights(world, operation("set_adapter"))

    outcome = sequences_run.check(with_operation(monkeypatch, own), bench)
    assert outcome == sequences_run.Outcome(operations=3, refused=(("own", "not on a split model"),))


def test_a_refusal_after_something_was_changed_is_a_failure(
    bench: sequences_run.SequenceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(world: Any) -> None:
        later_weights(world, operation("set_adapter"))
        if world.split:
            raise Gemma4CompatError("not on a split model")

    outcome = sequences_run.check(with_operation(monkeypatch, own), bench)
    assert outcome.failure is not None
    assert outcome.failure.signature == "forward: logits differs"
    assert outcome.operations == 2


def test_what_one_device_cannot_do_ends_the_sequence(
    bench: sequences_run.SequenceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(world: Any) -> None:
        if not world.split:
            raise ValueError("not here")

    outcome = sequences_run.check(with_operation(monkeypatch, own), bench)
    assert outcome == sequences_run.Outcome(operations=1, cut=("own", "ValueError: not here"))


def test_what_the_shim_changes_on_one_device_is_found(
    bench: sequences_run.SequenceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gemma4_compat

    def own(world: Any) -> None:
        if gemma4_compat.status()["accelerate-paged-layers"].state == gemma4_compat.PatchState.APPLIED:
            later_weights(world, operation("set_adapter"))

    sequence = with_operation(monkeypatch, own)
    assert sequences_run.check(sequence, bench).failure is None
    failure = sequences_run.check_one_device(sequence, bench).failure
    assert failure is not None
    assert failure.signature == "forward: logits differs"
    assert gemma4_compat.status()["accelerate-paged-layers"].state == gemma4_compat.PatchState.APPLIED


def test_a_sequence_shows_each_or_none_can() -> None:
    assert sequences_run.REPAIRED.keys() == DIFFERENT.keys() | NOT_DRAWN


@pytest.mark.full
@pytest.mark.parametrize("patch_id", DIFFERENT)
def test_what_is_repaired_on_one_device_too_differs_there_without_the_patch(
    patch_id: str, bench: sequences_run.SequenceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gemma4_compat

    sequence = generate(DIFFERENT[patch_id])
    assert sequences_run.check_one_device(sequence, bench).failure is None
    if gemma4_compat.status()[patch_id].state != gemma4_compat.PatchState.APPLIED:
        pytest.skip(f"{patch_id}: {gemma4_compat.status()[patch_id].reason}")
    if patch_id == "bitsandbytes-cpu-strides" and not has_quantized_audio_tower(sequence, bench):
        pytest.skip("this transformers quantizes no audio tower")
    monkeypatch.delitem(sequences_run.REPAIRED, patch_id)
    assert sequences_run.check_one_device(sequence, bench).failure is not None


def has_quantized_audio_tower(sequence: Sequence, bench: sequences_run.SequenceBench) -> bool:
    world = sequences_run.World(bench, sequence.case, split=False)
    try:
        return any("4bit" in type(module).__name__ for module in world.base.model.audio_tower.modules())
    finally:
        world.close()


# The pool.


def items(batch: list[str], folder: Path) -> Iterator[str]:
    """What a worker of the tests does with an item, by its name."""
    for item in batch:
        if item == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if item == "hang":
            time.sleep(1000)
        if item == "leave":
            os._exit(3)
        yield item.upper()


@pytest.mark.full
def test_a_process_that_dies_takes_one_item_with_it() -> None:
    batches = [["a", "crash", "b"], ["leave", "hang", "c"], ["d"]]
    found = dict(pool.spread(items, batches, jobs=2, limit=2.0, start=2.0))
    assert found.keys() == {"a", "b", "c", "d", "crash", "leave", "hang"}
    assert {item: found[item] for item in "abcd"} == {item: item.upper() for item in "abcd"}
    assert {item: found[item].reason for item in ("crash", "leave", "hang")} == {
        "crash": "signal 11",
        "leave": "exit 3",
        "hang": "time limit",
    }
    assert "in items" in found["hang"].detail
    assert sequences_cli.died(found["crash"]).signature.startswith("crash: signal 11")


def test_more_processes_than_batches_and_none_at_all() -> None:
    assert list(pool.spread(items, [], jobs=3, limit=2.0)) == []
    assert list(pool.spread(items, [["a"]], jobs=3, limit=2.0)) == [("a", "A")]
