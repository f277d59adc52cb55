"""The first child: what it says of the model, the adapter and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._doctor.check import machine, survey
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny_configs


def surveyed(folder: Path | None, work: Path, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """What it found, and its steps."""
    events: list[dict[str, Any]] = []
    order = {"folder": None if folder is None else str(folder), "work": str(work), "adapter": None, "vram": None}
    survey.run(order | {"context": 4096, "quantize": "4bit", "quick": True} | changes, events.append)
    return events[-1]["surveyed"], [event["step"] for event in events if "step" in event]


@pytest.fixture(autouse=True)
def _copies_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "speeds", lambda: dict.fromkeys(("pinned", "pageable", "device", "host"), 1))


def test_of_a_checkpoint(workspace: Any, tmp_path: Path) -> None:
    found, steps = surveyed(workspace.checkpoint, tmp_path, adapter=str(workspace.adapter("all")))
    assert steps == ["machine", "model", "plan", "speed of copies"]
    assert found["context"] == 256
    assert found["kinds"] == ["text", "long text", "image", "sound"]
    assert (found["model"]["variant"], found["model"]["layers"]) == (None, 6)
    assert found["adapter"] == {"type": "LORA", "ranks": [4], "keys": found["adapter"]["keys"], "problems": []}
    assert len(found["placements"]) == 2


def test_an_adapter_that_does_not_fit(workspace: Any, tmp_path: Path) -> None:
    found, _ = surveyed(workspace.checkpoint, tmp_path, adapter=str(workspace.mismatched_adapter()))
    assert [item["id"] for item in found["adapter"]["problems"]] == ["shape"]


def test_the_tiny_model_comes_with_an_adapter(tmp_path: Path) -> None:
    found, steps = surveyed(None, tmp_path)
    assert "tiny model" in steps
    assert Path(found["adapter_folder"]).is_relative_to(tmp_path)
    assert found["adapter"]["problems"] == []


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(Gemma4CompatError, match=r"there is no config\.json"):
        surveyed(tmp_path, tmp_path)


@pytest.mark.parametrize("name", variants.NAMES)
def test_whose_shape_it_is(name: str) -> None:
    try:
        text = variants.config(name).get_text_config()
    except Gemma4CompatError as error:
        pytest.skip(str(error))
    assert survey._variant(text) == name
    assert survey._variant(variants.config(name, layers=6).get_text_config()) is None
    assert survey._variant(tiny_configs.config(variant=name).get_text_config()) is None


def test_speeds_of_copies_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(machine, "_COPIED", 1 << 20)
    found = machine.speeds()
    assert set(found) == {"pinned", "pageable", "device", "host"}
    assert found["host"] is not None
    assert found["host"] > 1 << 20
