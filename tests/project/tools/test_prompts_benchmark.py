"""benchmarks/decoding/prompts.py: turns, and what its processes do."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.decoding import prompts
from benchmarks.peers import llama

ORDER = {"shape": "tiny-E2B", "where": "gpu", "upstream": False, "chunk": 8}


class Peer:
    """Answers like a process, with the number of the order as milliseconds."""

    def __init__(self, orders: list[dict[str, Any]], fails: str = "") -> None:
        self.orders, self.fails = orders, fails

    def tell(self, do: str, name: str, **more: Any) -> dict[str, Any]:
        self.orders.append(more)
        if more["way"] == self.fails:
            return {"error": "no"}
        return {"ms": float(len(self.orders)), "prompts_replayed": 1, "peak_gib_above_loaded": 0.5}


def test_ways_take_turns_with_texts_of_their_own() -> None:
    orders: list[dict[str, Any]] = []
    result: dict[str, Any] = {"lengths": {}, "machine": {"device": "CPU"}}
    peers: Any = dict.fromkeys(("default", "chunks", "any_length", prompts.LLAMA), Peer(orders))
    prompts.Measured(result, peers, rounds=2, chunk=8).length(20)
    found = result["lengths"]["20"]
    ways = [order["way"] for order in orders]
    assert ways[12:20] == [*peers, *reversed(peers)]
    assert ways[20:] == ["default", "chunks", "any_length"]
    assert [order["prompt"] for order in orders if order["way"] == "any_length"] == [20, 19, 18, 17, 16, 20]
    assert {order["prompt"] for order in orders if order["way"] != "any_length"} == {20}
    assert len({order["seed"] for order in orders}) == len(orders)
    assert found["summary"]["default"]["median"] == (13 + 20) / 2
    assert found["replayed"] == dict.fromkeys(peers, 2)
    assert "default 16.5 (14.8 to 18.2) +0.50 GiB" in prompts.line("20", found)
    prompts.Measured(result, peers, rounds=1, chunk=8).length(8)
    assert "chunks" not in result["lengths"]["8"]["summary"]


def test_every_way_wakes_its_patches_and_has_its_step_fused_before_its_turns() -> None:
    orders: list[dict[str, Any]] = []
    result: dict[str, Any] = {"lengths": {}, "machine": {"device": "H100"}}
    asked = prompts.Measured(result, dict.fromkeys(("chunks", "any_length"), Peer(orders)), rounds=1, chunk=8)  # type: ignore[arg-type]
    asked.wake(6)
    assert [(order["way"], order["prompt"]) for order in orders] == [("chunks", 9), ("any_length", 6)]
    asked.length(6)
    decoded = [order.get("new") for order in orders if order["way"] == "any_length"]
    assert decoded == [None, prompts.DECODED, *[None] * (prompts.FIRST + prompts.Progress.after + 2)]
    asked.length(33)
    chunked = [order["prompt"] for order in orders if order["way"] == "chunks"]
    replays = (chunked.count(33) - 2) * (33 // 8 - 1)  # of a full window before its turns
    assert replays >= prompts.Progress.after


def test_a_way_that_fails_takes_no_turn() -> None:
    orders: list[dict[str, Any]] = []
    result: dict[str, Any] = {"lengths": {}, "machine": {"device": "CPU"}}
    peers: Any = dict.fromkeys(("default", "at_once"), Peer(orders, fails="at_once"))
    prompts.Measured(result, peers, rounds=2, chunk=8).length(20)
    assert list(result["lengths"]["20"]["summary"]) == ["default"]
    assert [order["way"] for order in orders].count("at_once") == prompts.FIRST
    machines = {"machine": {"device": "H100"}}, {"machine": {"device": "CPU"}}
    lengths = {"lengths": {"20": {"captured": {"default": 0, "at_once": 2}}}}
    assert [prompts.problems(machine | lengths) for machine in machines] == [
        ["at_once at 20: 2 captures in its turns"],
        [],
    ]


@pytest.fixture
def measure(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    from benchmarks.decoding import prompts_measure
    from gemma4_compat._graphs import recording
    from gemma4_compat._lab.stand_ins import tape

    order = ORDER | {"folder": str(tmp_path)}
    with tape.standing_in(recording.RECORDERS), mock.patch.multiple(prompts_measure, _weights={}, _decodings={}):
        prompts_measure.build(order)
        prompts_measure.load(order)
        yield prompts_measure
        prompts_measure.measure.use(None)


def test_prompts_are_replayed_in_the_ways_that_do(measure: Any) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(7):  # the first ones may wake patches, and all is captured again then
        for way in measure.WAYS:
            prompt = 20 - number if way == "any_length" else 20
            found.setdefault(way, []).append(measure.read(ORDER | {"way": way, "prompt": prompt, "seed": number}))
    assert all(said["ms"] > 0 for several in found.values() for said in several)
    replayed = {way: [said.get("prompts_replayed") for said in several] for way, several in found.items()}
    assert replayed["upstream"] == [None] * 7
    assert replayed["default"] == [0] * 7
    for way in ("any_length", "at_once", "chunks"):
        assert all(replayed[way][5:]), replayed
        assert found[way][-1]["prompts_captured"] == 0
        assert found[way][-1]["reasons"] == []
    assert all(measure.knows({"way": way})["known"] for way in measure.WAYS)


def test_llama_cpp_reads_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    read: list[list[int]] = []
    logits = (ctypes.c_float * 4)(0.0, 1.0, 0.0, 0.0)

    def decode(_context: Any, piece: list[int]) -> int:
        read.append(piece)
        return 0

    api = types.SimpleNamespace(
        llama_token=ctypes.c_int32,
        llama_batch_get_one=lambda pointer, count: pointer[:count],
        llama_decode=decode,
        llama_get_memory=lambda _context: None,
        llama_memory_clear=lambda _memory, _data: None,
        llama_model_get_vocab=lambda _model: None,
        llama_vocab_n_tokens=lambda _vocabulary: 4,
        llama_get_logits_ith=lambda _context, _row: ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)),
    )
    monkeypatch.setattr(llama, "api", lambda: api)
    order = {"prompt": 2 * llama.BATCH + 3, "seed": 1, "vocabulary": 250}
    assert llama.read(order)["ms"] > 0
    assert [len(piece) for piece in read] == [llama.BATCH, llama.BATCH, 3]
    first, read[:] = [*read], []
    llama.read(order)
    assert read == first
    read.clear()
    llama.read(order | {"seed": 2})
    assert read != first
