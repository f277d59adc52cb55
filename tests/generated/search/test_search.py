"""Random placements: each loads, stays where the map says, and gives the outputs of the same weights on one device.

``python -m tests.generated.search`` runs more of them; see :mod:`tests.generated.search`. A failing case is shrunk
here and shown as a row for ``tests/generated/search/regressions.json``.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from typing import Any

import pytest

from tests.generated.search import regressions, run
from tests.generated.search.case import (
    GROUP,
    MAIN,
    OFFLOADED,
    Case,
    generate,
    is_complete,
    owner,
    simplifications,
    size,
    tree,
    walk,
)
from tests.generated.search.cli import coverage, features

pytestmark = pytest.mark.full

#: Half of the first 300; these have every value and every kind of map, too.
SEEDS = range(1, 300, 2)
#: How many cases may be tried to shrink a failure here; the command in the message has more patience.
ATTEMPTS = 40


@pytest.mark.parametrize(
    "seeds",
    [SEEDS[start : start + GROUP] for start in range(0, len(SEEDS), GROUP)],
    ids=lambda seeds: f"seeds-{seeds[0]}-{seeds[-1]}",
)
def test_every_placement_gives_the_outputs_of_one_device(seeds: range, bench: run.Bench) -> None:
    failures = {seed: run.check(generate(seed), bench) for seed in seeds}
    failing = {seed: failure for seed, failure in failures.items() if failure is not None}
    if failing:
        seed, failure = next(iter(failing.items()))
        shrunk = run.shrink(generate(seed), failure, bench, attempts=ATTEMPTS)
        lines = [f"seed {number}: {found.signature}" for number, found in failing.items()]
        pytest.fail(
            "\n".join(
                [
                    *lines,
                    f"repeat one: python -m tests.generated.search --cases 1 --seed {seed}",
                    "",
                    failure.detail,
                    "",
                ]
            )
            + regressions.row(shrunk, f"seed-{seed}", f"Seed {seed}: {failure.signature}"),
            pytrace=False,
        )


# What the search would not find, it does not show. So: it covers what it says, and it sees what is planted.


def test_the_cases_cover_every_value_and_every_kind_of_map() -> None:
    cases = [generate(seed) for seed in SEEDS]
    seen = collections.defaultdict(set)
    for case in cases:
        for field in dataclasses.fields(Case):
            seen[field.name].add(getattr(case, field.name))
    assert seen["model"] == {"conditional", "causal"}
    assert seen["layers"] == set(range(4, 10))
    assert seen["kv_shared"] == set(range(5))
    assert seen["quantization"] == {None, "4bit", "4bit-double", "8bit"}
    assert seen["adapter"] == {None, "text", "towers", "both"}
    assert seen["prompt"] == {"text", "media"}
    assert seen["load"] == {"from_pretrained", "dispatch_model"}
    assert seen["skip_keys"] == {"none", "own"}
    for field in ("per_layer", "experts", "keys_are_values", "wide_mlp", "vision", "audio"):
        assert seen[field] == {False, True}, field
    few = {name: sum(features(case)[name] for case in cases) for name in features(cases[0])}
    assert min(few.values()) >= 10, few
    assert "kv_shared" in coverage(cases)


def test_a_seed_is_one_case_for_ever_and_survives_json() -> None:
    for seed in range(0, 300, 7):
        case = generate(seed)
        assert case == generate(seed)
        assert Case.from_json(case.to_json()) == case
        assert is_complete(case)
        names = {node.name for node in walk(tree(case))}
        assert {name for name, _ in case.placement} <= names


def test_a_map_is_complete_when_every_module_has_an_entry_above_it() -> None:
    case = generate(0)
    with_map = lambda *entries: dataclasses.replace(case, placement=entries)  # noqa: E731
    assert is_complete(with_map(("", MAIN)))
    assert is_complete(with_map(("model", OFFLOADED), ("lm_head", MAIN)))
    assert not is_complete(with_map(("model", MAIN)))
    assert not is_complete(with_map(("", OFFLOADED))), "nothing is left on the main device"
    assert owner((("", MAIN), ("model.layers.1", OFFLOADED)), "model.layers.10.mlp") == ""
    assert owner((("model.embed_tokens", MAIN), ("", MAIN)), "model.embed_tokens_per_layer.weight") == ""


def test_simpler_cases_are_smaller_and_end() -> None:
    for seed in range(0, 100, 9):
        case, steps = generate(seed), 0
        while smaller := [s for s in simplifications(case) if is_complete(s) and size(s) < size(case)]:
            case, steps = smaller[0], steps + 1
            assert steps < 500
        assert case.layers == 2
        assert case.placement == (("", MAIN),)


@pytest.mark.parametrize("seed", [0, 100, 200])
def test_every_name_a_map_may_have_is_a_module_of_the_model(bench: run.Bench, seed: int) -> None:
    case = generate(seed)
    model = bench.base(case, {"": bench.main})
    modules = dict(model.named_modules())
    for node in walk(tree(case)):
        assert node.name in modules
        if node.splittable:
            covered = [child.name for child in node.children]
            tensors = [f"{node.name}.{name}".lstrip(".") for name in modules[node.name].state_dict()]
            assert all(owner(tuple((name, MAIN) for name in covered), tensor) is not None for tensor in tensors)


SPLIT = dataclasses.replace(
    generate(0),
    model="causal",
    layers=4,
    period=2,
    kv_shared=0,
    per_layer=True,
    experts=True,
    keys_are_values=False,
    wide_mlp=False,
    vision=False,
    audio=False,
    quantization=None,
    adapter="text",
    prompt="text",
    load="dispatch_model",
    skip_keys="own",
    placement=(
        ("model.embed_tokens", MAIN),
        ("model.embed_tokens_per_layer", MAIN),
        ("model.per_layer_model_projection", OFFLOADED),
        ("model.per_layer_projection_norm", OFFLOADED),
        ("model.layers", OFFLOADED),
        ("model.norm", MAIN),
        ("lm_head", MAIN),
    ),
)


def test_the_planted_case_is_good_without_a_defect(bench: run.Bench) -> None:
    assert is_complete(SPLIT)
    assert run.check(SPLIT, bench) is None


def perturb(model: Any) -> None:
    """One weight of the final norm, by a little."""
    import torch

    norm = next(module for name, module in model.named_modules() if name.endswith("model.norm"))
    with torch.no_grad():
        norm.weight[3] += 0.25


def lie_about_the_map(model: Any) -> None:
    owner_of_map = model.get_base_model() if hasattr(model, "get_base_model") else model
    owner_of_map.hf_device_map = {"": "disk"}


def bring_one_weight_back(model: Any) -> None:
    """The placement is quietly undone for one layer; the outputs stay right."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(next(m for name, m in model.named_modules() if name.endswith("layers.0.input_layernorm")))


@pytest.mark.parametrize(
    "tamper, signature",
    [
        (perturb, "outputs differ from those of one device"),
        (lie_about_the_map, "placement after: hf_device_map is"),
        (bring_one_weight_back, "Cannot copy out of meta|placement after: parameter MODULE"),
    ],
)
def test_a_planted_defect_is_found_and_shrunk(bench: run.Bench, tamper: Any, signature: str) -> None:
    failure = run.check(SPLIT, bench, tamper=tamper)
    assert failure is not None
    assert re.search(signature, failure.signature), failure
    shrunk = run.shrink(SPLIT, failure, bench, attempts=60, tamper=tamper)
    assert size(shrunk) < size(SPLIT)
    assert shrunk.layers == 2
    assert not shrunk.experts
    assert shrunk.adapter is None
    again = run.check(shrunk, bench, tamper=tamper)
    assert again is not None
    assert again.signature == failure.signature
    row = json.loads(regressions.row(shrunk, "planted", failure.signature))
    assert (row["id"], regressions.parsed(row)) == ("planted", shrunk)


def test_a_weight_that_only_changes_after_the_first_forward_is_found(bench: run.Bench) -> None:
    def later(model: Any) -> None:
        calls = iter(range(10**6))
        model.register_forward_pre_hook(lambda *_: perturb(model) if next(calls) == 2 else None)

    failure = run.check(SPLIT, bench, tamper=later)
    assert failure is not None
    assert failure.stage == "outputs"
