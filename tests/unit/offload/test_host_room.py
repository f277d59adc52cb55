"""One warning, before anything is loaded, where host memory has no room for what a device map keeps there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.quantization.bytes import stored_bytes
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._offload import host_room

TEXT = "of weights in host memory"


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    return Path(workspace.cached(tiny_models.build_moe_checkpoint))


def loaded(checkpoint: Path, quantization: str | None, placement: dict[str, Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gemma4_compat.quantize(offloaded=True, experts=True):
            model = tiny.load(checkpoint, quantization, device="cpu", device_map=placement)
    return model, [str(warning.message) for warning in caught if TEXT in str(warning.message)]


@pytest.mark.parametrize("quantization", [None, "8bit", "4bit"])
def test_what_is_counted_is_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, quantization: str | None
) -> None:
    """To 1 %: code books of 4-bit weights are counted one by one, and 8-bit scales are not."""
    counted: list[int] = []
    count = host_room.host_bytes
    monkeypatch.setattr(host_room, "host_bytes", lambda *given: counted.append(count(*given)) or counted[-1])
    model, warned = loaded(checkpoint, quantization, {"": "cpu"})
    assert not warned
    assert counted == [pytest.approx(sum(map(stored_bytes, model.parameters())), rel=0.01)]


def test_a_map_that_does_not_fit_is_one_warning(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    model, warned = loaded(checkpoint, None, {"": "cpu"})
    needed = sum(map(stored_bytes, model.parameters()))
    for free, expected in ((needed - 1, 1), (needed, 0), (None, 0)):
        monkeypatch.setattr(host_room, "available", lambda free=free: free)
        model, warned = loaded(checkpoint, None, {"": "cpu"})
        assert len(warned) == expected
        assert next(model.parameters()).device.type == "cpu"  # it was loaded all the same
        if expected:
            assert "'disk'" in warned[0]
            assert "quantize(offloaded=True" in warned[0]


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_a_quantized_checkpoint_is_counted_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path, quantization: str
) -> None:
    """Loaded again, without the bf16 one."""
    loaded(checkpoint, quantization, {"": "cpu"})[0].save_pretrained(tmp_path)
    counted: list[int] = []
    count = host_room.host_bytes
    monkeypatch.setattr(host_room, "host_bytes", lambda *given: counted.append(count(*given)) or counted[-1])
    model, warned = loaded(tmp_path, None, {"": "cpu"})
    assert not warned
    assert counted == [pytest.approx(sum(map(stored_bytes, model.parameters())), rel=0.01)]


def test_what_goes_elsewhere_takes_no_room(checkpoint: Path) -> None:
    from gemma4_compat._gemma4.models import build

    model = build.on_meta(str(checkpoint))[0]
    assert host_room.host_bytes(model, {"": 0, "lm_head": "disk"}) == 0
    experts = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter in model.named_parameters()
        if ".layers.1.experts." in name
    )
    assert experts > 0
    assert host_room.host_bytes(model, {"": 0, "model.language_model.layers.1.experts": "cpu"}) == experts


def group(folder: Path, limit: str, current: int, file: int) -> Path:
    folder.joinpath("memory.max").write_text(f"{limit}\n")
    folder.joinpath("memory.current").write_text(f"{current}\n")
    folder.joinpath("memory.stat").write_text(f"anon 7\nfile {file}\nkernel 3\nshmem 50\n")
    return folder


@pytest.mark.parametrize("limit, expected", [("max", None), ("900", 900 - 500 + (200 - 50)), ("100", 0)])
def test_a_container_has_what_its_limit_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, expected: int | None
) -> None:
    monkeypatch.setattr(host_room, "_CGROUP", tmp_path)
    unlimited = host_room.available()  # no such files: another system
    assert unlimited is not None
    assert unlimited > 1 << 20
    group(tmp_path, limit, 500, 200)
    assert host_room.available() == (pytest.approx(unlimited, rel=0.2) if expected is None else expected)


def test_a_machine_that_cannot_say(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    def fail() -> Any:
        raise OSError("/proc is not mounted")

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    assert host_room.available() is None
