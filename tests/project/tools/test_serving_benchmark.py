"""benchmarks/serving/serving.py: servers of ours and of llama.cpp in turns, and the table of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import llama_server, serving
from tests.helpers import ROOT, child
from tools.pages import serving as page


def server(tokens_s: float, **more: Any) -> dict[str, Any]:
    """What a run has of a server that gave every number of clients as much."""
    load = {"tokens_s": tokens_s, "tokens": 100, "prompt_tokens": 40, "first_ms": {"median": 20.0}}
    return {"loads": [load | {"clients": clients} for clients in serving.CLIENTS], **more}


OURS = [server(400.0, parallel=1), server(1200.4, parallel=16)]
THEIRS = [
    server(100.0 * parallel, server="llama.cpp", parallel=parallel, sampling=sampling)
    for parallel in (1, 16)
    for sampling in llama_server.SAMPLINGS
]


def test_the_table_has_a_row_for_each_server_that_did_not_fail() -> None:
    failed = {"server": "llama.cpp", "parallel": 16, "sampling": "device", "error": "it ended"}
    rows = page.table({"servers": [*OURS, *THEIRS[:3], failed], "llama_cpp": "version: 1"}).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:7]] == [
        "| `gemma4-compat serve`, `--parallel 1`",
        "| `gemma4-compat serve`, `--parallel 16`",
        "| llama.cpp's `llama-server`, `--parallel 1`",
        "| llama.cpp's `llama-server`, `--parallel 16`",
        "| `llama-server --backend-sampling`, `--parallel 1`",
    ]
    assert rows[3].endswith("| 1,200 | 1,200 | 1,200 | 20 ms | 20 ms | 20 ms |")
    assert len({row.count("|") for row in rows[:7]}) == 1
    assert rows[7] == ""
    assert rows[8].startswith("llama.cpp has Q4_0")


def test_without_llama_cpp_the_table_has_our_servers_alone() -> None:
    assert "llama" not in page.table({"servers": OURS})
    assert len(page.table({"servers": OURS}).splitlines()) == 4


def test_servers_that_failed_or_had_other_work_are_problems() -> None:
    assert serving.problems([*OURS, *THEIRS]) == []
    short = server(1.0, server="llama.cpp", parallel=1, sampling="host")
    short["loads"][1]["tokens"] = 50
    failed = {"server": "llama.cpp", "parallel": 16, "sampling": "host", "error": "it ended"}
    assert serving.problems([*OURS, short, failed]) == [
        "llama.cpp, 16 at a time: it ended",
        "4 clients: tokens from 50 to 100",
    ]


def test_llama_cpp_reads_as_many_tokens_as_our_server(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from gemma4_compat._lab import tiny_models

    tiny_models.build_checkpoint(tmp_path)
    serving.write_tokenizer(tmp_path)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for question in serving.QUESTIONS:
        text = ours.apply_chat_template([{"role": "user", "content": question}], tokenize=False)
        assert len(ours(text)["input_ids"]) == 1 + llama_server.prompt(question).count("ab")


def test_llama_cpp_needs_a_shape() -> None:
    done = child(str(ROOT / "benchmarks" / "serving" / "serving.py"), "--llama-cpp", "tree")
    assert done.code == 2
    assert "--llama-cpp needs --shape" in done.stderr


@pytest.mark.full
@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no built tree of llama.cpp")
def test_llama_cpp_answers_in_turns_with_ours(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    few = ["--rounds", "1", "--requests", "10", "--answer", "16", "--no-bare", "--parallel", "1", "4"]
    tree = ["--llama-cpp", os.environ["LLAMA_CPP"], "--shape", "tiny-E2B"]
    done = child(str(ROOT / "benchmarks" / "serving" / "serving.py"), *few, *tree, "--out", str(out), timeout=500)
    assert done.code == 0, done.stdout + done.stderr
    servers = json.loads(out.read_text(encoding="utf-8"))["servers"]
    assert [one.get("sampling") for one in servers] == [None, None, *llama_server.SAMPLINGS, *llama_server.SAMPLINGS]
    assert all(load["tokens_s"] > 0 for one in servers for load in one["loads"])


@pytest.mark.full
def test_texts_of_three_starts(tmp_path: Path) -> None:
    out = tmp_path / "starts.json"
    few = ["--starts", "--answer", "8", "--context", "256"]
    done = child(str(ROOT / "benchmarks" / "serving" / "serving.py"), *few, "--out", str(out), timeout=300)
    assert done.code == 0, done.stdout + done.stderr
    found = json.loads(out.read_text(encoding="utf-8"))["starts"]
    assert [one["start"] for one in found] == ["no kernels on disk", "kernels on disk", "at once"]
    assert all({"started", "warm"} <= one["seconds"].keys() for one in found)
    assert {text["tokens"] > 0 for one in found for text in one["texts"]} == {True}
