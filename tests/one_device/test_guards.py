"""The table of guards: what each feature that keeps something does about each way to change a model.

Every cell runs: the change is made to a model with the feature and to the same model without it, and both are asked.
Nothing is put back before they are compared.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

from torch.utils.hooks import RemovableHandle

import gemma4_compat
from gemma4_compat._plan.training_step import TARGETS
from gemma4_compat._training.captured import layers
from tests.helpers import ROOT
from tests.one_device import guards
from tests.one_device.guards import FEATURES, WAYS, CannotMatter, Documented, Noticed, Way
from tests.patches.training.parts import only
from tests.unit.generation import calls
from tests.unit.generation.conftest import models as models
from tests.unit.generation.conftest import tapes as tapes
from tests.unit.prefix_cache import chats

pytestmark = pytest.mark.usefixtures("tapes")
#: Steps until every layer is captured, and one more.
SETTLED = layers.CAPTURED_AT + 1


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    chats.small(monkeypatch)


@pytest.fixture
def changed() -> Iterator[Callable[..., None]]:
    """Makes the change of a way, to each of some models. Hooks on every module go when the test has ended."""
    returned: list[Any] = []
    yield lambda way, *models: returned.extend([way.change(model) for model in models])
    for handle in returned:
        if isinstance(handle, RemovableHandle):
            handle.remove()


@pytest.fixture(scope="module")
def made(models: Any) -> Callable[[Way], Any]:
    """The model of a way, of the test's own, with its first change."""
    plain: list[Any] = []

    def made(way: Way) -> Any:
        if way.model == "plain":
            if not plain:
                plain.append(two_adapters(models.workspace.load().float()))
                # The first in a process wakes a patch, and other functions are noticed.
                guards.collected(copy.deepcopy(plain[0]))
            found = copy.deepcopy(plain[0])
        else:
            places = {"4bit": ("4bit-double", "language", "device"), "streamed": (None, "language", "streamed")}
            found = models.fresh(*places[way.model])
            guards.trained("lora_", True)(found)
        if way.before is not None:
            way.before(found)
        return found.eval()

    return made


def two_adapters(model: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=128, target_modules=TARGETS, init_lora_weights=False)
    found = get_peft_model(model.requires_grad_(False), config)
    found.add_adapter("second", config)
    guards.trained("layernorm", True)(found)
    return found


def cells() -> list[Any]:
    return [
        pytest.param(feature, way, id=f"{feature}-{name}", marks=[pytest.mark.full] if way.full else [])
        for name, way in WAYS.items()
        for feature in FEATURES
    ]


@pytest.mark.parametrize(("feature", "way"), cells())
def test_a_cell(made: Callable[[Way], Any], changed: Callable[..., None], feature: str, way: Way) -> None:
    cell = way.cells[FEATURES.index(feature)]
    CHECKS[feature](functools.partial(changed, way), way, cell, made(way), made(way))
    if isinstance(cell, Documented):
        assert cell.words in " ".join(Path(ROOT, cell.page).read_text(encoding="utf-8").split())


def of_a_prefix(change: Callable[..., None], way: Way, cell: guards.Cell, model: Any, other: Any) -> None:
    import torch

    chats.reusing(model)
    ids = chats.text(20, 0)
    ids = chats.ask(model, ids).sequences.cpu()
    before, held = chats.reused(model, ids)
    assert held > 0
    chats.ask(other, ids)  # on some CPUs bitsandbytes packs 4-bit weights in their first forward
    change(model, other)
    found, held = chats.reused(model, ids)
    assert (held == 0) == isinstance(cell, Noticed)
    if isinstance(cell, Documented):  # what the page says to do
        chats.reusing(model)
        found = chats.ask(model, ids)
    expected = chats.ask(other, ids)
    assert found.logits[0].equal(expected.logits[0]) or isinstance(cell, CannotMatter)
    torch.testing.assert_close(found.logits[0], expected.logits[0], rtol=1e-4, atol=1e-4)
    if way.shows:
        assert not torch.allclose(before.logits[0].float(), found.logits[0].float(), rtol=1e-3, atol=1e-3)


def of_graphs(change: Callable[..., None], way: Way, cell: guards.Cell, model: Any, _other: Any) -> None:
    gemma4_compat.decode_fast(model, exact=True)
    guards.base(model).generation_config.cache_implementation = None  # each call says
    if cell is not guards.WITH_HOOKS:
        before = calls.compared(model, calls.ask(model))
    captured = calls.steps(model).captured
    change(model)
    counted = calls.steps(model)
    found = calls.ask(model)({})
    now = calls.steps(model)
    (expected,), (one,) = calls.ask(model)(calls.EAGER), found
    calls.assert_equal(one, expected)
    assert (now.captured > captured or now.replayed == counted.replayed) == (
        cell is guards.NOTICED or cell is guards.WITH_HOOKS
    )
    if way.shows and cell is not guards.WITH_HOOKS:
        assert calls.differ(before, found)


def step(model: Any) -> list[Any]:
    """The loss, and each gradient, by the name of its weight."""
    import torch

    ids = torch.randint(3, 240, (2, 16), generator=torch.Generator().manual_seed(6))
    model.zero_grad()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    loss.backward()
    found = [(name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None]
    assert found
    return [("loss", loss.detach()), *((name, gradient.clone()) for name, gradient in found)]


def of_training(change: Callable[..., None], way: Way, cell: guards.Cell, model: Any, other: Any) -> None:
    for one in (model, other):
        one.train()
    only(model, graphs=True)
    for _ in range(SETTLED):
        step(model)
    before = gemma4_compat.statistics(model).training
    assert before.replayed > 0 or cell in (guards.WITH_HOOKS, guards.EAGER)
    change(model, other)
    right = step(other)
    for _ in range(SETTLED):
        found = step(model)
        assert [name for name, _ in found] == [name for name, _ in right]
        assert all(one.equal(two) for (_, one), (_, two) in zip(found, right))
    now = gemma4_compat.statistics(model).training
    again = now.captured > before.captured or now.reasons != before.reasons
    assert again == isinstance(cell, Noticed)


CHECKS = {"reuse_prefix": of_a_prefix, "decode_fast": of_graphs, "train_fast": of_training}


def test_every_cell_says_why() -> None:
    assert all(len(way.cells) == len(FEATURES) for way in WAYS.values())
    reasons = [cell.because for way in WAYS.values() for cell in way.cells if isinstance(cell, CannotMatter)]
    assert all(reasons)
