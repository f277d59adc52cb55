"""transformers-per-layer-devices: a per-layer embedding on another device than its projection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat.patches.placement import transformers_per_layer_devices
from gemma4_compat.patches.placement.transformers_per_layer_devices import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: Expected all tensors to be on the same device"


@pytest.mark.parametrize("hooked, moved", [(None, "cpu"), ("cpu", "cpu"), ("meta", "meta")])
def test_only_what_is_on_another_device_is_moved(hooked: str | None, moved: str) -> None:
    torch = pytest.importorskip("torch")
    norm = SimpleNamespace() if hooked is None else SimpleNamespace(_hf_hook=SimpleNamespace(execution_device=hooked))
    model, looked_up, seen = SimpleNamespace(per_layer_projection_norm=norm), torch.ones(2), []

    def original(*arguments: Any) -> None:
        seen.append(arguments)

    transformers_per_layer_devices.project_per_layer_inputs(original, model, "embedded", looked_up)
    transformers_per_layer_devices.project_per_layer_inputs(original, model, "embedded")
    (_, _, first), (*_, second) = seen
    assert first.device.type == moved
    assert (first is looked_up) == (moved == "cpu")
    assert second is None
