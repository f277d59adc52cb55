"""One placement of the tiny model, in this process: its steps, and what a fault in one leaves of the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._doctor.check import answers, case, placements
from tests.helpers import without

OPTIONS = {"context": 128, "quantize": "4bit", "vision": True, "audio": True}
Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(workspace: Any, tmp_path: Path) -> Run:
    """The events of a placement, by its number."""
    found = placements.propose(str(workspace.checkpoint), 1 << 40, 1 << 40, count=3, options=OPTIONS)

    def run(number: int, **changes: Any) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        order = found[number] | {
            "label": "base",
            "folder": str(workspace.checkpoint),
            "adapter": None,
            "kinds": ["text", "image", "sound"],
            "contexts": [],
            "longest": 128,
            "quick": True,
            "image": None,
            "store": str(tmp_path),
            "work": str(tmp_path),
            "limit": None,
            "seconds": 100,
            **changes,
        }
        case.Case(order, events.append).run()
        return events

    return run


def done(events: list[dict[str, Any]]) -> dict[str, Any]:
    return {event["done"]: event["found"] for event in events if "done" in event}


def failed(events: list[dict[str, Any]]) -> dict[str, Any]:
    return {event["failed"]: event["error"] for event in events if "failed" in event}


def test_placements_have_the_same_bits_with_the_adapter_and_without(run: Run, workspace: Any) -> None:
    adapter = str(workspace.adapter("all"))
    first = done(run(0, adapter=adapter, contexts=[32]))
    assert first["text"]["against"] is None
    assert first["text with the adapter"]["changed"] is True
    assert first["speed at 32 tokens"]["eager"]["tokens_s"] > 0
    for number in (1, 2):
        other = done(run(number, adapter=adapter))
        compared = {name: item["against"]["equal"] for name, item in other.items() if "against" in item}
        assert len(compared) == 8
        assert all(compared.values())
        assert other["image"]["digest"] == first["image"]["digest"]


@pytest.mark.usefixtures("tapes")
def test_replayed_steps_are_those_of_eager_ones(run: Run) -> None:
    found = done(run(1, kinds=["text"], contexts=[32]))
    assert found["fast decoding"]["against_eager"]["equal"]
    assert found["fast decoding"]["replayed"] > 0
    assert found["speed at 32 tokens"]["fast"]["tokens_s"] > 0


def test_without_graphs_no_step_is_replayed_and_the_reason_is_said(run: Run) -> None:
    found = done(run(0, kinds=["text"]))["fast decoding"]
    assert found["replayed"] == 0
    assert found["reasons"] == ["the model is on cpu, and graphs need CUDA"]


def test_a_patch_that_is_off(run: Run) -> None:
    """It is silent: what is offloaded stays in bf16, and the answers are others."""
    run(0)
    with without("transformers-quantize-offloaded"):
        found = done(run(2))
    assert [found[kind]["against"]["equal"] for kind in ("text", "image", "sound")] == [False] * 3
    assert found["text"]["against"]["difference"] > 0


def test_an_adapter_of_another_shape_leaves_the_answers_of_the_base(run: Run, workspace: Any) -> None:
    events = run(0, adapter=str(workspace.mismatched_adapter()), kinds=["text"])
    assert set(done(events)) == {"load", "text", "fast decoding", "peak"}
    (error,) = failed(events).values()
    assert "size mismatch" in error["message"] or "shape" in error["message"]
    assert not any(event.get("step", "").endswith("with the adapter") for event in events)


def test_a_full_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step can keep its answer for the next placement; each says so, and all are tried."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers.Store, "compare", full)
    events = run(0, kinds=["text", "image"])
    errors = failed(events)
    assert set(errors) == {"text", "image", "fast decoding"}
    for error in errors.values():
        assert (error["type"], error["patches"]) == ("OSError", [])
        assert "The disk is full" not in error["message"]
        assert "Make room" in error["advice"]
    assert "peak" in done(events)


def test_a_crash_names_the_patch_that_is_off(run: Run) -> None:
    """Other programs raise this text as well: the patch is named because it is off."""
    with without("bitsandbytes-meta-quant-state"):
        events = run(2)
    errors = failed(events)
    assert {"text", "image", "sound"} <= set(errors)
    error = errors["text"]
    assert error["type"] == "NotImplementedError"
    assert error["message"] == "Cannot copy out of meta tensor; no data!"
    assert {"id": "bitsandbytes-meta-quant-state", "state": "reverted"} in error["patches"]
    assert error["frames"][-1].startswith(("torch/", "bitsandbytes/"))


def test_what_has_no_time_left_is_left_out(run: Run) -> None:
    events = run(0, kinds=["text"], contexts=[32, 64], seconds=0)
    assert [event["skipped"] for event in events if "skipped" in event] == ["speed at 32 tokens", "speed at 64 tokens"]
    assert "fast decoding" in done(events)


@pytest.mark.usefixtures("tapes")
def test_own_kernels_are_compared_with_themselves_and_eager_steps_with_exact_ones(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def decode_fast(model: Any, *, enabled: bool = True, exact: bool = False) -> Any:
        asked.append((enabled, exact))
        return gemma4_compat.decode_fast(model, enabled=enabled, exact=exact)

    monkeypatch.setattr(case, "decode_fast", decode_fast)
    first, second = (done(run(number, kinds=["text"]))["fast decoding"] for number in (0, 1))
    assert asked == [(True, True), (True, False)] * 2
    assert first["own"]["against"] is None
    assert second["own"]["against"]["equal"]
    assert second["against_eager"]["equal"]
