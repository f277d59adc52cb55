"""The table of guards (``tests/one_device/guards.py``), row by row, for each user of the one class.

What each user asks of its guards is asked here; ``tests/one_device/test_guards.py`` runs the users themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

from torch.utils.hooks import RemovableHandle

from gemma4_compat._gemma4.models import walk
from gemma4_compat._graphs import unsupported
from gemma4_compat._graphs.guards import digests
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._graphs.statistics import Cause
from gemma4_compat._offload.transfer import streaming
from tests.one_device import guards, test_guards
from tests.one_device.guards import FEATURES, WAYS, Way

#: What these guards do not decide. The hook on the embeddings is outside of the layers: it changes the kind of their
#: calls. In the first forward that collects, patches wake up, which replaces functions of classes.
ELSEWHERE = {("train_fast", "inputs require gradients"), *((feature, "a hook that collects") for feature in FEATURES)}
made = test_guards.made


class User:
    """What asks the guards, and how."""

    def __init__(self, feature: str, model: Any) -> None:
        inner = guards.base(model) if hasattr(model, "get_base_model") else model
        self._feature = feature
        if feature == "reuse_prefix":
            self.guards = ModelGuards(walk.modules(inner), offloaded=False)
        elif feature == "decode_fast":
            groups = [group for streamer in streaming.streamers(inner) for group in streamer.groups()]
            self.guards = ModelGuards(unsupported.modules_of_a_step(inner), groups=groups)
        else:
            layers = inner.get_decoder().layers
            self.guards = ModelGuards([part for layer in layers for part in layer.modules()], trained=True)
        self._adapters, self._contents = self.guards.active_adapters(), self._values()

    def _values(self) -> tuple[Any, ...]:
        return self.guards.contents() if self._feature == "reuse_prefix" else ()

    def may_go_on(self) -> bool:
        """Whether what was computed before may be used again."""
        if self._feature == "reuse_prefix":
            same = self.guards.check_under_any_adapter() and self.guards.active_adapters() == self._adapters
            return same and self._values() == self._contents
        return self.guards.check_step() and self.guards.check_all()


def cells() -> list[Any]:
    return [
        pytest.param(feature, way, id=f"{feature}-{name}")
        for name, way in WAYS.items()
        for feature in FEATURES
        if way.model == "plain" and (feature, name) not in ELSEWHERE
    ]


@pytest.mark.parametrize(("feature", "way"), cells())
def test_a_cell(made: Callable[[Way], Any], tapes: Any, feature: str, way: Way) -> None:
    """From the second question on, the values of weights are read by a recording."""
    model = made(way).train(feature == "train_fast")
    user = User(feature, model)
    assert user.may_go_on()
    assert list(user.guards._digest._recorded) == (["cpu"] if feature == "reuse_prefix" else [])
    handle = way.change(model)
    try:
        noticed = not user.may_go_on()
        assert noticed == (way.cells[FEATURES.index(feature)] is guards.NOTICED)
        if noticed:
            reason = user.guards.reason()
            assert isinstance(reason.cause, Cause)
            assert reason.detail or user.guards.check_under_any_adapter()  # else another adapter, or other values
    finally:
        if isinstance(handle, RemovableHandle):
            handle.remove()


def test_weights_without_numbers_are_not_summed(tapes: Any) -> None:
    """A device may have nothing else."""
    import torch

    digest, tensors = digests.Digest(), [torch.empty(0), torch.empty(0, 3)]
    assert [digest(lambda: tensors) for _ in range(3)] == [(), (), ()]


def test_a_model_that_is_gone() -> None:
    import torch

    gone: list[str] = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    found = ModelGuards(list(model.modules()), lambda _guards, name: gone.append(name))
    assert found.check_step()
    del model
    assert gone
    assert not any(check() for check in (found.check_step, found.check_rotating, found.check_all, found.check_memory))


def test_a_copy_is_another_model(made: Callable[[Way], Any]) -> None:
    model = made(WAYS[".data of the base"])
    user = User("decode_fast", model)
    copy.deepcopy(model)
    assert user.may_go_on()
