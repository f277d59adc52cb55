"""What fast decoding holds has bounds, and goes with what it belongs to."""

from __future__ import annotations

import copy
import io
import pickle
import random
import weakref
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._graphs import decoder
from tests.conftest import census
from tests.helpers import holders
from tests.unit.generation.calls import Models, ask, assert_equal, base, compared, generate, layers, steps, text, whole

pytestmark = pytest.mark.usefixtures("tapes")


def graphs(model: Any) -> list[Any]:
    return list(decoder.of(base(model)).steps.graphs())


def within_bounds(model: Any, alive: int = 0) -> None:
    kept = decoder.of(base(model))
    assert len(graphs(model)) <= decoder.MAX_GRAPHS
    assert len(kept._states.states) <= decoder.MAX_STATES
    assert len(kept.memories) <= alive + 2  # before a `generate` lets go of what it does not need
    addresses = {memory.addresses for memory in kept.memories}
    assert {graph.addresses for graph in graphs(model)} <= addresses


@pytest.mark.full
def test_thirty_calls_of_many_kinds(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MAX_GRAPHS", 3)
    monkeypatch.setattr(decoder, "MAX_STATES", 2)
    model, chance = models.fresh(None, "towers"), random.Random(1)
    names = ["default", "second", "third"]
    for name in names[1:]:
        model.load_adapter(models.workspace.adapter("towers"), name)
    model.eval()
    held: list[Any] = []
    for _ in range(30):
        model.set_adapter(chance.choice(names))
        given = text(model, chance.choice([3, 9]), batch=chance.choice([1, 2]), seed=chance.randrange(9))
        found = whole(model, given, new=chance.choice([3, 4]), **chance.choice([{}, {"output_hidden_states": True}]))
        held = [*held, cache_names.cache_in(found)][-chance.choice([1, 3]) :]
        del found
        within_bounds(model, alive=len(held) + 1)
    assert steps(model).captured > decoder.MAX_GRAPHS
    assert steps(model).reasons == ()
    held.clear()
    for _ in range(2):
        generate(model, text(model))
    assert len(decoder.of(base(model)).memories) <= 2
    compared(model, ask(model))


@pytest.mark.full
def test_memory_is_flat(models: Models) -> None:
    model = models.fresh(None)
    sizes = []
    for _ in range(3):
        for length, batch in ((24, 1), (9, 2)):
            generate(model, text(model, length, batch=batch), new=4)
        sizes.append(census())
    assert sizes[1] == sizes[2]


def test_the_graph_that_was_used_longest_ago_goes_first(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MAX_GRAPHS", 2)
    model = models.fresh(None)
    kinds: list[dict[str, Any]] = [{}, {"output_hidden_states": True}, {"num_beams": 2}]
    cache = whole(model, text(model)).past_key_values  # each kind has its own memory, or transformers keeps one
    for kind in kinds:
        compared(model, ask(model, **kind))
        assert len(graphs(model)) <= 2
    del cache
    for kind in kinds:
        compared(model, ask(model, **kind))
        assert len(graphs(model)) <= 2


@pytest.mark.parametrize(("adapter", "where"), [("language", "device"), (None, "streamed")])
def test_a_deleted_model_leaves_nothing(models: Models, adapter: str | None, where: str) -> None:
    model = models.fresh("4bit-double", adapter, where)
    for batch in (1, 2):
        generate(model, text(model, batch=batch))
    assert steps(model).replayed > 0
    left = [weakref.ref(graph.recording) for graph in graphs(model)]
    left += map(weakref.ref, model.modules())
    if where == "device":  # accelerate keeps weights that it has dispatched
        left += map(weakref.ref, model.parameters())
    del model
    assert holders(left) == []


def test_turned_off_a_model_keeps_no_graph_and_no_cache(models: Models) -> None:
    model = gemma4_compat.decode_fast(models.fresh(None))
    expected = generate(model, text(model), cache_implementation=None)
    left = [weakref.ref(graph.recording) for graph in graphs(model)]
    left += [weakref.ref(tensor) for memory in decoder.of(base(model)).memories for tensor in memory.tensors]
    assert left
    gemma4_compat.decode_fast(model, enabled=False)
    vars(model).pop("_cache", None)  # transformers itself keeps it before 5.15
    assert holders(left) == []
    gemma4_compat.decode_fast(model)
    assert_equal(generate(model, text(model), cache_implementation=None), expected)


def test_a_deleted_module_lets_its_weights_go(models: Models) -> None:
    import torch

    model = models.fresh(None)
    compared(model, ask(model))
    weight = weakref.ref(layers(model)[1].mlp.up_proj.weight)
    layers(model)[1].mlp = torch.nn.Identity().eval()
    assert holders([weight]) == []
    assert graphs(model) == []
    compared(model, ask(model))


def test_a_replaced_weight_is_let_go(models: Models) -> None:
    import torch

    model = models.fresh(None)
    compared(model, ask(model))
    linear = layers(model)[1].mlp.up_proj
    weight = weakref.ref(linear.weight)
    linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)
    assert weight() is None
    compared(model, ask(model))


@pytest.mark.parametrize("adapter", [None, "language"])
def test_a_copy_has_no_graphs_and_decodes_the_same(models: Models, adapter: str | None) -> None:
    model = models.fresh(None, adapter)
    (expected,) = compared(model, ask(model))
    before = steps(model)
    other = copy.deepcopy(model)
    assert steps(other).replayed == 0
    assert_equal(*compared(other, ask(other)), expected)
    assert steps(model) == before
    assert_equal(generate(model, text(model)), expected)
    assert steps(model).captured == before.captured


def test_a_pickled_model_has_no_graphs(models: Models) -> None:
    import torch

    model = models.fresh(None)
    (expected,) = compared(model, ask(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert steps(other).replayed == 0
        assert_equal(*compared(other, ask(other)), expected)


def test_a_saved_model_and_its_state(models: Models, tmp_path: Any) -> None:
    model, untouched = models.fresh(None), models.workspace.load()
    compared(model, ask(model))
    assert model.state_dict().keys() == untouched.state_dict().keys()
    model.save_pretrained(tmp_path)
    assert model.config.to_dict() == untouched.config.to_dict()
    assert "gemma4_compat" not in (tmp_path / "generation_config.json").read_text()
