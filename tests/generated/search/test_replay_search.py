"""Random changes of a model between two calls of ``generate``: a replay gives the bits of ``disable_compile=True``.

``python -m tests.generated.search.replays`` runs more of them. A failing sequence is shrunk here and shown as a row
for ``tests/generated/search/regressions.json``.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._graphs.guards import torch_hooks
from tests.generated.search import regressions, replays_cli, replays_run, sequences_run
from tests.generated.search.case import Case, is_complete
from tests.generated.search.regressions import REPLAYS
from tests.generated.search.replay_rules import EXTRAS, OWN, PARTS, PATCHES, WEIGHTS, generate
from tests.generated.search.replay_showing import MODES, SHOWING
from tests.generated.search.replay_tuners import TUNERS
from tests.generated.search.replays_cli import counted
from tests.generated.search.sequence import Sequence, operation
from tests.generated.search.sequence_shrinking import simplifications, size
from tests.helpers import Finished

#: The first dozen of four in the fast suite.
SEEDS = range(2000, 2048)
DOZENS = range(SEEDS.start, SEEDS.stop, 12)
#: How many sequences may be tried to shrink a failure here; the command in the message has more patience.
ATTEMPTS = 30
NEEDS = "needs the upstream libraries: pip install 'gemma4-compat[test]'"
MAIN = (("", "main"),)


@pytest.fixture(autouse=True)
def _nothing_on_every_module() -> Iterator[None]:
    """No sequence begins with hooks of every module that another left, or with a patch that is off."""

    def reset() -> None:
        for hooks in torch_hooks.on_every_module():
            hooks.clear()
        gemma4_compat.install()

    reset()
    yield
    reset()


@pytest.fixture
def bench() -> Iterator[replays_run.SequenceBench]:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    with replays_run.bench() as place:
        yield place


@pytest.mark.parametrize(
    "start", [pytest.param(first, marks=[pytest.mark.full] * (first in DOZENS[1:])) for first in DOZENS]
)
def test_a_replay_gives_the_bits_of_the_step_it_stands_for(start: int, bench: replays_run.SequenceBench) -> None:
    found = {seed: replays_run.check(generate(seed), bench) for seed in range(start, start + 12)}
    failing = {seed: outcome.failure for seed, outcome in found.items() if outcome.failure is not None}
    if failing:
        seed, failure = next(iter(failing.items()))
        shrunk = sequences_run.shrink(generate(seed), failure, bench, attempts=ATTEMPTS, check=replays_run.check)
        lines = [f"seed {number}: {wrong.signature}" for number, wrong in failing.items()]
        repeat = f"repeat one: python -m tests.generated.search.replays --cases 1 --seed {seed}"
        row = regressions.row(shrunk, f"seed-{seed}", f"Seed {seed}: {failure.signature}")
        pytest.fail("\n".join([*lines, repeat, "", failure.detail, "", row]), pytrace=False)
    assert sum(outcome.steps for outcome in found.values()) > 12
    assert sum(outcome.compared - outcome.raised for outcome in found.values()) > 24


@pytest.mark.parametrize("sequence", REPLAYS.values(), ids=REPLAYS)
def test_what_failed_once_holds_now(sequence: Sequence, bench: replays_run.SequenceBench) -> None:
    outcome = replays_run.check(sequence, bench)
    assert outcome.failure is None, outcome.failure.detail
    assert outcome.steps > 0 or any(step.name == "hook" for step in sequence.operations)


# What the search would not find, it does not show. So: it covers what it says, and it sees what is planted.


def test_the_sequences_cover_every_change_every_tuner_and_every_option() -> None:
    counts = counted(map(generate, range(1000)))
    assert counts["operations"].keys() == {*replays_run.CHANGES, *SHOWING}
    assert counts["tuner"].keys() == set(TUNERS)
    assert counts["mode"].keys() - {"True", "False"} == set(MODES)
    assert counts["extra"].keys() == set(EXTRAS)
    assert counts["cache"].keys() == {"static", "fast", "own", "dynamic", "none"}
    assert counts["inside"].keys() == {"disabled", "inference", "gradients", "autocast"}
    assert counts["fails"].keys() == {"error", "interrupt"}
    assert set(WEIGHTS) <= counts["by"].keys()
    assert set(OWN) <= counts["what"].keys()
    assert counts["quantization"].keys() == {"None", "4bit", "4bit-double"}
    assert counts["streamed"].keys() == {"True", "False"}
    values: dict[str, set[Any]] = collections.defaultdict(set)
    for seed in range(1000):
        for step in generate(seed).operations:
            for key, value in step.options:
                values[key].add(value)
    assert values["part"] == set(PARTS)
    assert values["patch"] == {None, *PATCHES}
    assert not {name: number for name, number in counts["operations"].items() if number < 3}


def test_a_seed_is_one_sequence_for_ever_and_survives_json() -> None:
    for seed in SEEDS:
        sequence = generate(seed)
        assert sequence == generate(seed)
        assert Sequence.from_json(sequence.to_json()) == sequence
        assert is_complete(sequence.case)


def test_simpler_sequences_are_smaller_and_end() -> None:
    for seed in range(0, 60, 7):
        sequence, count = generate(seed), 0
        while smaller := [s for s in simplifications(sequence) if size(s) < size(sequence)]:
            sequence, count = smaller[0], count + 1
            assert count < 500
        assert len(sequence.operations) == 1


PLANTED = Sequence(
    case=Case(placement=MAIN),
    operations=(
        operation("forward"),
        operation("generate", mode="greedy", cache="static", new=4, seed=1),
        operation("module", layer=0, by="swapped"),
        operation("let_go"),
        operation("generate", mode="greedy", cache="static", new=4, seed=1),
    ),
)


def test_a_planted_defect_is_found_and_shrunk(
    bench: replays_run.SequenceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemma4_compat._graphs.guards.model import ModelGuards

    assert replays_run.check(PLANTED, bench).failure is None
    monkeypatch.setattr(ModelGuards, "check_all", lambda self: True)
    failure = replays_run.check(PLANTED, bench).failure
    assert failure is not None
    shrunk = sequences_run.shrink(PLANTED, failure, bench, attempts=40, check=replays_run.check)
    assert [step.name for step in shrunk.operations] == ["generate", "module", "generate"]
    row = json.loads(regressions.row(shrunk, "planted", failure.signature))
    assert (row["id"], regressions.parsed(row)) == ("planted", shrunk)


def test_what_raises_both_ways_is_no_failure_and_what_raises_once_is(
    bench: replays_run.SequenceBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = operation("generate", mode="greedy", cache="static", seed=1)
    broken = Sequence(case=Case(placement=MAIN), operations=(operation("broken"), shown))
    monkeypatch.setitem(replays_run.CHANGES, "broken", lambda world: delattr(world.text, "norm"))
    outcome = replays_run.check(broken, bench)
    assert (outcome.failure, outcome.compared, outcome.raised) == (None, 1, 1)
    monkeypatch.setitem(SHOWING, "generate", lambda *_, **__: ({"error": "ValueError: no"}, {"sequences": 1}))
    failure = replays_run.check(broken, bench).failure
    assert failure is not None
    assert "ValueError: no" in failure.detail


def test_the_command_says_what_it_found(
    warm_child: Callable[..., Finished], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDS)
    sequence = Sequence(case=PLANTED.case, operations=PLANTED.operations[1:2]).to_json()
    done = warm_child(str(Path(replays_cli.__file__).with_name("replays.py")), "--sequence", sequence, timeout=300)
    assert done.code == 0, done.stdout + done.stderr
    assert "good: 1 calls, 2 replayed steps" in done.stdout
    with pytest.raises(SystemExit) as ended:
        replays_cli.main(["--regression", "no-such"])
    assert ended.value.code == 2
    assert "no regression has the id 'no-such'" in capsys.readouterr().err
