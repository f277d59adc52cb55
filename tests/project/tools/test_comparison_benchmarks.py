"""The benchmarks that compare_report.py reports, end to end on the tiny shape; small_card.py has its own file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from tests.helpers import ROOT, Finished, child

pytestmark = pytest.mark.full


@pytest.fixture
def run(tmp_path: Path, warm_child: Callable[..., Finished]) -> Callable[..., dict[str, Any]]:
    """``run(name, *options)``: what that benchmark wrote."""
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

    def result(name: str, *options: str, left_out: list[str] | None = None, shape: str = "tiny") -> dict[str, Any]:
        out = tmp_path / "results" / f"{name}-{shape}.json"
        fixed = ["--shape", shape, "--minutes", "8", "--out", str(out), "--work", str(tmp_path)]
        done = warm_child(str(ROOT / common.script(name)), *fixed, *options, timeout=500)
        assert done.code == 0, done.stdout + done.stderr
        text = out.read_text(encoding="utf-8")
        assert str(tmp_path) not in text
        assert [path.name for path in tmp_path.iterdir()] == ["results"], "the checkpoint is removed"
        found: dict[str, Any] = json.loads(text)
        assert set(found["machine"]["versions"]) >= {"transformers", "accelerate", "peft", "bitsandbytes", "torch"}
        assert found["not_run"] == (left_out or [])
        return found

    return result


def test_loading_an_adapter_is_measured_in_turns_with_upstream(run: Callable[..., dict[str, Any]]) -> None:
    found = run("adapter_load", "--rounds", "1")
    assert [entry["placement"] for entry in found["rounds"]] == ["towers", "table-towers", "all-gpu"]
    assert [entry["order"][0] for entry in found["rounds"]] == ["ours", "upstream", "ours"]
    for entry in found["rounds"]:
        assert entry["ours"]["seconds"] > 0
    split = found["rounds"][0]["ours"]
    assert split["towers_on"] == ["meta"]
    assert split["entries"] == split["entries_before"] > 1
    assert found["summary"]["all-gpu"]["ratio"]["of"] == 1
    assert any("from_pretrained" in row["function"] for row in found["profile"]["ours"]["cumulative"])


def test_the_idle_shim_is_counted_and_timed(run: Callable[..., dict[str, Any]]) -> None:
    found = run("idle_shim", "--blocks", "1")
    assert list(found["models"]) == ["plain", "base", "adapter"]
    for model in found["models"].values():
        assert set(model["costs"]) == {"token", "prefill"}
        with_shim, without = model["calls"]["token"]["python_calls"]
        assert with_shim > without > 100
        for counts in model["calls"]["token"]["all_counts"]["without"].values():
            assert len(set(counts)) == 1, "the same each time"
        more, fewer = model["calls"]["token"]["instructions"]
        assert more > fewer > 1000
        assert model["left_by_switching"] == {"prefill": {}, "token": {}}


def test_the_lock_is_counted_and_timed_in_turns(run: Callable[..., dict[str, Any]]) -> None:
    found = run("model_lock", "--rounds", "2")
    assert list(found["models"]) == ["4-bit", "bf16"]
    for model in found["models"].values():
        assert model["hooks"] > 2
        assert model["streamed_layers"] > 2
        assert [list(entry) for entry in model["rounds"]] == [["A1", "b1", "b2", "A2"], ["A2", "b2", "b1", "A1"]]
        assert set(model["cost"]["ratios"]) == {"cost", "with", "without"}
        calls = model["calls"]
        with_lock, without = calls["differing"]["gemma4_compat/_offload/model_lock.py _call"]
        assert 2 < with_lock <= model["hooks"]  # a tower is not called
        assert without == 0


def test_the_alternatives_are_compared_with_the_same_weights_on_one_device(run: Callable[..., dict[str, Any]]) -> None:
    found = run("alternatives", "--only", "upstream-split,ours-split")
    assert list(found["choices"]) == ["gpu", "gpu-linear", "upstream-split", "ours-split"]
    assert "Gemma4ClippableLinear" in found["choices"]["upstream-split"]["error"]
    ours = found["choices"]["ours-split"]
    assert ours["answer"]["parity"] == 0.0
    assert ours["answer"]["on"]["towers"] == {"meta": ours["answer"]["on"]["towers"]["meta"]}
    assert 0 < ours["share"] < 10


def test_both_ways_to_decode_are_timed_and_compared(run: Callable[..., dict[str, Any]]) -> None:
    cases, parts = "gpu,gpu+lora,auto-2", "speed,bits,short,endurance"
    fixed = ["--rounds", "1", "--answers", "4", "--endurance-tokens", "300"]
    found = run("graph_decoding", "--cases", cases, "--parts", parts, *fixed, left_out=["auto-2 (needs a GPU)"])
    assert list(found["cases"]) == ["gpu", "gpu+lora"]
    for entry in found["cases"].values():
        assert entry["speed"]["summary"]["ratio"]["of"] == 1
        assert entry["load"]["planned_gib"]["peak"] > 0
        assert {data["logits_differ_by"] for data in entry["bits"].values()} == {0.0}
        assert all(data["tokens_equal"] and data["logits"] >= 12 for data in entry["bits"].values())
        assert [len(seconds) for seconds in entry["short"]["4"].values()] == [3, 1]
    with_adapter = found["cases"]["gpu+lora"]
    assert with_adapter["bits"].keys() - found["cases"]["gpu"]["bits"].keys() == {"adapter switched"}
    assert with_adapter["endurance"]["summary"]["tokens"] >= 300
    assert with_adapter["endurance"]["summary"]["wrong"] == 0 < with_adapter["endurance"]["summary"]["compared"]


def test_ways_take_turns_deep_in_a_text(run: Callable[..., dict[str, Any]]) -> None:
    parts = ["--parts", "first,speed,profile,check", "--ways", "before", "--rounds", "1"]
    found = run("depth", "--cases", "gpu,host+lora", "--contexts", "64,96", *parts)
    assert list(found["cases"]) == ["gpu", "host+lora"]
    for entry in found["cases"].values():
        assert list(entry["contexts"]) == ["64", "96"]
        for data in entry["contexts"].values():
            assert data["summary"]["before"]["of"] == 1
            assert (data["warm"]["before"]["steps"]["captured"], data["captured"]) == (1, 0)
    assert set(found["cases"]["gpu"]["check"]["summary"]) == {"read", "filled"}
    assert set(found["cases"]["gpu"]["first"]["before"]) == {"cold", "later"}


def test_trainer_is_run_with_upstream_alone_and_with_the_shim(run: Callable[..., dict[str, Any]]) -> None:
    short = ["--sequences", "16", "--steps", "3", "--long", "4", "--budget", "12"]
    found = run("trainers", "--ways", "upstream,shim,chunked", *short)
    assert [(one["way"], len(one["losses"])) for one in found["runs"]] == [
        ("upstream", 4),
        ("shim", 4),
        ("chunked", 4),
    ]
    first = [one["losses"][0] for one in found["runs"]]
    assert first[0] == first[1]
    assert not found["out"]
    assert set(found["differences"]) == {"shim, 16 tokens", "chunked, 16 tokens"}
    assert set(found["loads"]) == {"upstream, gpu", "shim, gpu"}
    for load in found["loads"].values():
        assert found["machine"]["versions"].items() <= load["versions"].items()
    assert {(len(one["settling_s"]), len(one["seconds"])) for one in found["runs"]} == {(2, 2)}
    assert found["cut_off"] == {}
    assert found["fits"] == {"12": {}}  # memory is not measured on a CPU


def test_trl_is_run_on_the_same_base_with_upstream_alone_and_with_the_shim(run: Callable[..., dict[str, Any]]) -> None:
    pytest.importorskip("trl", reason="needs trl: nox -s clients")
    ways = ["upstream", "trl", "shim", "trl-shim", "shim"]  # of "shim" twice: TRL leaves nothing on the base
    found = run("trainers", "--ways", ",".join(ways), "--sequences", "16", "--steps", "3")
    assert [one["way"] for one in found["runs"]] == ways
    losses = [one["losses"][0] for one in found["runs"]]
    assert losses[0] == losses[2] == losses[4]
    assert losses[1] == losses[3]
    assert [one["adapters"] for one in found["runs"][1:3]] == [["torch.bfloat16"], ["torch.float32"]]


def test_upstream_compiles_in_a_process_of_its_own(run: Callable[..., dict[str, Any]]) -> None:
    found = run("graph_decoding", "--cases", "gpu", "--parts", "compiled", "--rounds", "1")
    assert list(found["compiled"]["upstream"]["speed"]["first"]) == ["compiled"]
    assert set(found["compiled"]["replayed"]["speed"]["first"]) == {"eager", "replayed"}


def test_peers_decode_the_same_weights_one_at_a_time(run: Callable[..., dict[str, Any]]) -> None:
    fixed = ["--peers", "shim,upstream,llama-q4_0", "--rounds", "1"]
    found = run("peers", *fixed, left_out=["llama-q4_0 (no --llama-cpp)"])
    assert list(found["peers"]) == ["shim", "upstream"]
    for name, entry in found["peers"].items():
        assert entry["shim"] == (name == "shim")
        assert entry["speed"]["summary"]["tok_s"]["of"] == 1
        assert entry["speed"]["summary"]["load_s"] > 0
        assert entry["adapter"]["tok_s"] > 0
        assert entry["offload"]["tok_s"] > 0
    ours, upstream = (entry["answers"] for entry in found["peers"].values())
    assert ours == upstream, "the same 4-bit weights"
    assert 0 < ours["divergence"] < 1
    assert "vLLM" in found["not_had"]


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no built tree of llama.cpp")
def test_llama_cpp_decodes_the_same_weights(run: Callable[..., dict[str, Any]]) -> None:
    tree = ["--llama-cpp", os.environ["LLAMA_CPP"]]
    found = run("peers", "--peers", "llama-q8_0,llama-bf16", "--rounds", "1", *tree, shape="tiny-E2B")
    for entry in found["peers"].values():
        assert "error" not in entry["speed"]
        assert entry["answers"]["divergence"] < 0.1
        assert entry["tool"]["decode"]["tok_s"] > 0


@pytest.mark.parametrize(
    "name", ["adapter_load", "idle_shim", "model_lock", "alternatives", "graph_decoding", "depth", "peers"]
)
def test_bad_arguments_are_one_clear_error(name: str) -> None:
    done = child(str(ROOT / common.script(name)))
    assert done.code == 2
    assert "--shape is required" in done.stderr
    done = child(str(ROOT / common.script(name)), "--shape", "E9B")
    assert done.code == 2
    assert "E9B" in done.stderr


def test_steps_on_some_multiprocessors(run: Callable[..., dict[str, Any]]) -> None:
    """On a CPU, which has none: nothing bounds it."""
    found = run("multiprocessors", "--counts", "4,2", "--rounds", "1", "--host", shape="tiny-E2B")
    assert {count: list(cases) for count, cases in found["counts"].items()} == {
        "4": ["gpu", "gpu+lora", "host", "host+lora"],
        "2": ["gpu", "gpu+lora"],
    }
    for cases in found["counts"].values():
        assert [len(entry["rounds"]) for entry in cases.values()] == [1] * len(cases)
        assert all(entry["work"]["quantized"] > 0 for entry in cases.values())
        assert [entry["work"]["adapted"] > 0 for entry in cases.values()] == ["lora" in case for case in cases]
