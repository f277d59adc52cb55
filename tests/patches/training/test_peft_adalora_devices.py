"""peft-adalora-devices: the loss of AdaLoRA on several devices.

Trained, saved, loaded and merged on two devices: tests/unit/gemma4/adapters/test_tuners_on_two_devices.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat.patches.training import peft_adalora_devices
from gemma4_compat.patches.training.peft_adalora_devices import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: Expected all tensors to be on the same device"


def adapted(*devices: str) -> Any:
    """An AdaLoRA model of a layer on each device, whose loss is on the first."""
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict(
        {f"lora_A_{index}": torch.nn.Linear(2, 2, device=device) for index, device in enumerate(devices)}
    )
    model.forward = lambda **_: SimpleNamespace(loss=torch.zeros((), device=devices[0]))
    return SimpleNamespace(model=model, rank=3)


def seen(model: Any, **arguments: Any) -> Any:
    """What upstream's forward gets for ``self``."""
    found: list[Any] = []
    peft_adalora_devices.adalora_forward(lambda self, **_: found.append(self), model, **arguments)
    return found[0]


@pytest.mark.parametrize(
    "devices, arguments",
    [
        (["cpu", "cpu"], {"labels": 1}),
        (["cpu", "meta"], {"labels": 1}),
        (["cpu", "cpu"], {}),
        (["cpu"], {"labels": None}),
    ],
)
def test_on_one_device_or_without_labels_it_is_upstreams(devices: list[str], arguments: dict[str, Any]) -> None:
    model = adapted(*devices)
    assert seen(model, **arguments) is model


def test_elsewhere_the_matrices_go_to_the_loss() -> None:
    torch = pytest.importorskip("torch")
    model = adapted("cpu", "cpu")
    stand_in = peft_adalora_devices._AdaLora(model)
    assert stand_in.rank == 3
    weights = dict(model.model.named_parameters())
    assert stand_in.model.forward().loss.device.type == "cpu"
    for name, value in stand_in.model.named_parameters():
        assert value is weights[name], "where the loss is, nothing is copied"
    model.model.forward = lambda **_: SimpleNamespace(loss=torch.zeros((), device="meta"))
    stand_in.model.forward()
    assert [value.device.type for _, value in stand_in.model.named_parameters()] == ["meta"] * len(weights)
