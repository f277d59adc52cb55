"""Several answers at a time: the text of each is that of an idle server that writes one after the other."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gemma4_compat._engine import versions
from gemma4_compat._gemma4.quantization import expert_storage, experts
from gemma4_compat._generation import continuous
from gemma4_compat._graphs import decoder
from gemma4_compat._kernels.match import custom
from gemma4_compat._lab import tiny
from gemma4_compat._lab.trained import TWINS, Trained
from gemma4_compat.cli.serving import together, warm_up
from tests.helpers import ROOT
from tests.unit.commands import serving
from tests.unit.commands.serving import QUESTIONS, Server

if any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "fastapi", "openai", "uvicorn")):
    pytest.skip("needs the upstream libraries and the extra [serve]: pip install '.[test]'", allow_module_level=True)
if not versions.admits(">=5.15", versions.installed("transformers") or "0"):
    pytest.skip("serve needs transformers 5.15 or newer", allow_module_level=True)


@contextlib.contextmanager
def fast(found: Any) -> Iterator[Any]:
    """After ``decode_fast``, with stand-ins for CUDA graphs and for kernels that compute each row by itself."""
    import gemma4_compat
    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._lab.stand_ins import tape
    from tests.unit.kernels.by_rows import ByWidth

    with pytest.MonkeyPatch.context() as patched, tape.standing_in(RECORDERS):
        patched.setattr(custom, "CustomKernels", ByWidth)
        patched.setattr(custom, "unsupported_reason", lambda _device: None)
        serving.fast(found)
        yield found
        gemma4_compat.decode_fast(found.model, enabled=False)


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with fast(serving.load(Trained.find())) as found:
        yield found


def with_experts(**options: Any) -> Any:
    """The trained tiny 26B-A4B, with its experts in 4 bits."""
    found = serving.load(Trained(ROOT / TWINS["26B-A4B"]), **options)
    for module in experts.all_experts(found.base).values():
        expert_storage.quantize_module(module, tiny.quantization_config("4bit-double"))
    return found


@pytest.fixture(scope="module")
def alone(served: Any) -> Iterator[Server]:
    with serving.running(served) as found:
        yield found


@pytest.fixture(scope="module")
def server(served: Any) -> Iterator[Server]:
    with serving.running(served, parallel=4) as found:
        yield found


def asked(index: int) -> tuple[str, dict[str, Any]]:
    """A question and its options: greedy or sampled, of a few lengths, to the model or its pirate."""
    options: dict[str, Any] = {"max_tokens": 4 + 9 * (index % 4), "model": ("model", "pirate")[index // 5 % 2]}
    if index % 3 == 1:
        options |= {"temperature": 0.9, "seed": index, "top_p": (None, 0.8)[index % 2]}
    if index % 6 == 5:
        options["extra_body"] = {"repetition_penalty": 1.2}
    return QUESTIONS[(3 * index + index // 8) % len(QUESTIONS)], {k: v for k, v in options.items() if v is not None}


def answer(server: Server, index: int, *, streamed: bool = False) -> str:
    question, options = asked(index)
    options = {"temperature": 0, **options}
    made = server.client().chat.completions.create(messages=serving.turns(question), stream=streamed, **options)
    if not streamed:
        return str(made.choices[0].message.content)
    return "".join(part.choices[0].delta.content or "" for part in made)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many answers each step was for."""
    found: list[int] = []
    step = continuous.Batch.step

    def noted(self: Any, *args: Any) -> Any:
        found.append(len(self.lengths))
        return step(self, *args)

    monkeypatch.setattr(continuous.Batch, "step", noted)
    return found


@pytest.fixture
def long(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers have 60 tokens at least."""
    monkeypatch.setattr(served.base.generation_config, "min_new_tokens", 60)


def in_parallel(count: int, ask: Any) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


@pytest.mark.parametrize("clients", [1, 4, pytest.param(16, marks=pytest.mark.full)])
def test_each_text_is_that_of_the_request_alone(alone: Server, server: Server, rows: list[int], clients: int) -> None:
    expected = [answer(alone, index) for index in range(clients)]

    def late(index: int) -> str:
        time.sleep(0.01 * (index % 5))
        return answer(server, index, streamed=bool(index % 2))

    assert in_parallel(clients, late) == expected
    assert max(rows) <= 4
    if clients == 16:
        assert len({*rows}) >= 3


def test_the_next_turn_reads_what_is_new(alone: Server, server: Server, served: Any) -> None:
    """The same part of it as in an idle server, which decides how it is rounded."""

    def chat(index: int, asked: Server = server) -> list[str]:
        first = asked.text(QUESTIONS[index])
        return [first, asked.text(QUESTIONS[index], first, QUESTIONS[index + 2])]

    counted = decoder.statistics(served.base)
    served.conversations.forget()
    expected = [chat(index, alone) for index in range(2)]
    served.conversations.forget()
    reused = counted.prompt_tokens_reused
    assert in_parallel(2, chat) == expected
    assert counted.prompt_tokens_reused > reused + 30


@pytest.mark.parametrize("parallel", [1, 4])
def test_no_answer_waits_for_a_capture(served: Any, monkeypatch: pytest.MonkeyPatch, parallel: int) -> None:
    """Not for that of a prompt or of a text, sampled or greedy, with an adapter or without, alone or beside others."""
    monkeypatch.setattr(warm_up, "_TOKENS", 4)
    counted = decoder.statistics(served.base)
    with serving.running(served, parallel=parallel) as server:
        worker, expected = server.app.state.worker, server.text(QUESTIONS[0])
        worker.prepare()
        assert server.text(QUESTIONS[0]) == expected
        assert not worker.prepared, "the request waited for all pieces"
        assert serving.until(lambda: worker.prepared, 300)
        captured, eager = (counted.captured, counted.prompts_captured), counted.eager
        in_parallel(4, lambda index: answer(server, index))
        in_parallel(4, lambda index: answer(server, index + 5))
    assert (counted.captured, counted.prompts_captured) == captured
    assert counted.eager == eager
    assert counted.reasons == ()


def test_a_stop_text_a_limit_and_usage(alone: Server, server: Server) -> None:
    def ended(index: int) -> Any:
        made = server.ask(QUESTIONS[0], **({"stop": "four"}, {"max_tokens": 3}, {"max_tokens": 1})[index])
        return made.choices[0].message.content, made.choices[0].finish_reason, made.usage.completion_tokens

    expected = [alone.text(QUESTIONS[0], max_tokens=count) for count in (3, 1)]
    (text, *_), *others = in_parallel(3, ended)
    assert text == "A fox has "
    assert others == [(expected[0], "length", 3), (expected[1], "length", 1)]


def test_a_client_that_goes_away_leaves_the_others_alone(
    alone: Server, server: Server, long: None, rows: list[int]
) -> None:
    expected = alone.text(QUESTIONS[1], max_tokens=60)

    def ask(index: int) -> str:
        if index:
            return server.text(QUESTIONS[1], max_tokens=60)
        with server.ask(QUESTIONS[0], stream=True) as parts:
            next(iter(parts))
        return ""

    assert in_parallel(3, ask) == ["", expected, expected]
    assert serving.until(lambda: server.app.state.worker._here == 0)
    assert rows[-1] < max(rows)


@pytest.mark.parametrize("where", ["a step", "a prompt", "a text that joins"])
def test_out_of_memory_ends_what_needed_it(
    alone: Server, server: Server, served: Any, long: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A prompt needs it for its own answer. A step does for all, and so does moving the rows for one that joins."""
    import openai

    expected, failing = alone.text(QUESTIONS[0], max_tokens=60), [True]
    read, step, join = type(served).read, continuous.Batch.step, continuous.Batch.join

    def reads(self: Any, adapter: Any, inputs: Any, **options: Any) -> None:
        if where == "a prompt" and server.app.state.worker._answers and failing.pop():
            raise torch.OutOfMemoryError
        read(self, adapter, inputs, **options)

    def steps(self: Any, *args: Any) -> Any:
        if where == "a step" and len(self.lengths) == 2 and failing.pop():
            raise torch.OutOfMemoryError
        return step(self, *args)

    def joins(self: Any, *args: Any) -> int:
        if where == "a text that joins" and self.lengths and failing.pop():
            raise torch.OutOfMemoryError
        return join(self, *args)

    def ask(index: int) -> str:
        time.sleep(0.2 * index)
        try:
            return server.text(QUESTIONS[0], max_tokens=60)
        except openai.InternalServerError as error:
            return "503" if "not enough memory" in str(error) else str(error)

    with monkeypatch.context() as patched:
        patched.setattr(type(served), "read", reads)
        patched.setattr(continuous.Batch, "step", steps)
        patched.setattr(continuous.Batch, "join", joins)
        found = in_parallel(2, ask)
    assert sorted(found) == sorted(["503", expected] if where == "a prompt" else ["503", "503"])
    assert not failing
    assert server.text(QUESTIONS[0], max_tokens=60) == expected


def test_a_prompt_whose_cache_is_not_kept_is_answered_by_itself(
    server: Server, served: Any, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = server.text(QUESTIONS[0])
    rows.clear()
    monkeypatch.setattr(served.conversations, "take", lambda: None)
    assert server.text(QUESTIONS[0]) == expected
    assert rows == []


@pytest.mark.full
def test_experts_in_4_bits(rows: list[int]) -> None:
    def ask(server: Server, index: int) -> str:
        time.sleep(0.01 * (index % 5))
        options = {"temperature": 0.9, "seed": index} if index % 3 == 1 else {"temperature": 0}
        turns = serving.turns(QUESTIONS[index])
        given = {"model": "model", "messages": turns, "max_tokens": 6 + 9 * (index % 4), **options}
        return str(server.client().chat.completions.create(**given).choices[0].message.content)

    with fast(with_experts(adapters=[])) as served:
        with serving.running(served) as alone:
            expected = [ask(alone, index) for index in range(8)]
        assert not rows
        with serving.running(served, parallel=4) as server:
            assert in_parallel(8, lambda index: ask(server, index)) == expected
    assert len(set(expected)) > 4
    assert max(rows) == 4


def test_experts_that_see_the_other_answers() -> None:
    """In bf16, or with the pirate's adapter on them, which the base has to share the server with."""
    served = serving.load(Trained(ROOT / TWINS["26B-A4B"]), adapters=[])
    for found, why in (
        (served, "the experts are not in 4 bits"),
        (with_experts(), "the experts have an adapter or something else around them"),
    ):
        with fast(found):
            assert str(together.unsupported_reason(found)).endswith(f"differs bitwise beside others, as {why}")


def test_where_answers_come_one_after_the_other(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(custom, "unsupported_reason", lambda _device: "no kernels here")
    with serving.running(served, parallel=4) as found:
        assert type(found.app.state.worker).__name__ == "Worker"
    assert "answers come one after the other: no kernels here" in caplog.text
