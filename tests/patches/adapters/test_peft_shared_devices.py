"""peft-shared-devices: Lily computes, and RandLora is merged, on several devices.

Trained, saved, loaded and merged on two devices: tests/unit/gemma4/adapters/test_tuners_on_two_devices.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat.patches.adapters import peft_shared_devices
from gemma4_compat.patches.adapters.peft_shared_devices import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: Expected all tensors to be on the same device"


def test_on_one_device_lily_is_upstreams() -> None:
    torch = pytest.importorskip("torch")
    linear, x, asked = torch.nn.Linear(2, 2, bias=False), torch.ones(1, 2), []
    layer = SimpleNamespace(
        lily_A={"default": linear}, lily_B={"default": linear}, active_adapters=["default", "other"]
    )
    peft_shared_devices.lily_forward(lambda *arguments: asked.append(arguments), layer, x)
    assert asked == [(layer, x)]


def test_elsewhere_only_the_shared_weights_are_others() -> None:
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(2, 2, bias=False)
    layer = SimpleNamespace(
        lily_A={"default": linear, "idle": linear},
        lily_B={"default": linear, "idle": linear},
        active_adapters=["default"],
        scaling={"default": 3.0},
    )
    seen: list[Any] = []
    peft_shared_devices.lily_forward(lambda *arguments: seen.append(arguments), layer, torch.ones(1, 2, device="meta"))
    ((stand_in, _),) = seen
    assert stand_in.scaling is layer.scaling
    for shared in (stand_in.lily_A, stand_in.lily_B):
        assert list(shared) == ["default"]
        assert shared["default"].weight.device.type == "meta"
        assert shared["default"](torch.ones(1, 2, device="meta")).shape == (1, 2)
    assert layer.lily_A["default"] is linear


def test_randlora_is_merged_where_its_layer_is_and_computes_where_it_is_asked_to() -> None:
    torch = pytest.importorskip("torch")
    layer = SimpleNamespace(get_base_layer=lambda: torch.nn.Linear(2, 2, device="meta"))
    asked: list[Any] = []
    for device in (None, torch.device("cpu")):
        peft_shared_devices.randlora_bases(lambda *arguments: asked.append(arguments[1:]), layer, "default", device)
    assert asked == [("default", torch.device("meta")), ("default", torch.device("cpu"))]
