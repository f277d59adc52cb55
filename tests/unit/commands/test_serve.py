"""``gemma4-compat serve``, asked by OpenAI's client: a trained tiny model in a thread's server."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest

from gemma4_compat._engine import versions
from gemma4_compat._lab.trained import Trained
from tests.project.docs.stand_ins import on_the_cpu
from tests.unit.commands import serving
from tests.unit.commands.serving import QUESTIONS, Server, post, turns, until

if any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "fastapi", "openai", "uvicorn")):
    pytest.skip("needs the upstream libraries and the extra [serve]: pip install '.[test]'", allow_module_level=True)
if not versions.admits(">=5.15", versions.installed("transformers") or "0"):
    pytest.skip("serve needs transformers 5.15 or newer", allow_module_level=True)

FOX, LEGS, ARR = QUESTIONS[0], "A fox has four legs.", "Arr, a fox has four legs, matey."


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained.find()


@pytest.fixture(scope="module")
def served(trained: Trained) -> Any:
    return serving.load(trained)


@pytest.fixture(scope="module")
def server(served: Any) -> Iterator[Server]:
    with serving.running(served) as found:
        yield found


@pytest.fixture
def endless(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers go on for 450 tokens."""
    monkeypatch.setattr(served.base.generation_config, "min_new_tokens", 450)


def idle(server: Server) -> bool:
    return server.app.state.worker._here == 0


# ----- answers -----


def test_it_answers_as_itself_and_as_a_pirate(server: Server, served: Any, trained: Trained) -> None:
    assert server.text(FOX) == LEGS
    assert server.text(FOX, model="pirate") == ARR
    assert server.streamed(FOX) == LEGS
    assert server.streamed(FOX, model="pirate") == ARR
    with served.model.disable_adapter():
        assert trained.answer(served.model, FOX) == LEGS
    assert (server.text(FOX), server.text(FOX, model="pirate")) == (LEGS, ARR)


def test_the_base_stays_without_its_adapter(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT goes through every layer to switch, which takes longer than a token."""
    switched = []
    for name in ("disable_adapter_layers", "enable_adapter_layers"):
        was = getattr(served.model.base_model, name)
        monkeypatch.setattr(served.model.base_model, name, lambda was=was, name=name: (switched.append(name), was()))
    with serving.running(served) as server:
        assert server.text(FOX, model="pirate") == ARR
        assert [server.text(FOX) for _ in range(3)] == [LEGS] * 3
        assert server.text(FOX, model="pirate") == ARR
    assert [name for name, after in zip(switched, [*switched[1:], None]) if name != after] == switched
    assert switched[-2:] == ["disable_adapter_layers", "enable_adapter_layers"]


def test_a_template_the_parser_does_not_know(server: Server, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the prompt for an answer."""
    template = served.processor.chat_template.replace("<|turn>model\n", "<|turn>model ")
    assert template != served.processor.chat_template
    monkeypatch.setattr(served.processor, "chat_template", template)
    answer = server.streamed(FOX, max_tokens=20)
    assert answer == server.text(FOX, max_tokens=20)
    assert answer
    assert "turn" not in answer
    assert FOX not in answer


def test_a_prompt_that_begins_a_thought(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser's view of it comes before the answer's turn."""
    from gemma4_compat.cli.serving import answers

    def begun(self: Any, asked: Any) -> Any:
        prompt = prepared(self, asked)
        prompt.text += "<|channel>thought\nHm."
        return prompt

    prepared = answers.Preparation.prompt
    monkeypatch.setattr(answers.Preparation, "prompt", begun)
    parts = [part.choices[0].delta for part in server.ask(FOX, stream=True)]
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts).startswith("Hm.")


def test_models_are_listed(server: Server) -> None:
    assert [model.id for model in server.client().models.list()] == ["model", "pirate"]


def test_usage_and_reasons(server: Server) -> None:
    whole = server.ask(FOX)
    assert whole.choices[0].finish_reason == "stop"
    used = whole.usage
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    assert used.completion_tokens == len(LEGS) + 1  # a token a byte, and the end
    *_, last = server.ask(FOX, stream=True)
    assert last.usage == used
    assert last.choices[0].finish_reason == "stop"
    short = server.ask(FOX, max_tokens=5)
    assert (short.choices[0].finish_reason, short.choices[0].message.content) == ("length", "A fox")
    assert short.usage.completion_tokens == 5
    exactly = server.ask(FOX, max_completion_tokens=len(LEGS) + 1)
    assert exactly.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stop, text", [("four", "A fox has "), ([" has", "legs"], "A fox"), ("fourteen", LEGS)])
def test_a_stop_text_is_not_shown(server: Server, stop: Any, text: str) -> None:
    whole = server.ask(FOX, stop=stop)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "stop")
    assert server.streamed(FOX, stop=stop) == text
    if text != LEGS:  # it ends with the token that completes the stop text
        assert whole.usage.completion_tokens == len(text) + len(stop if isinstance(stop, str) else stop[0])


def test_a_seed_decides_what_is_sampled(server: Server) -> None:
    def sampled(seed: int | None) -> str:
        client = server.client().chat.completions
        answer = client.create(model="model", messages=turns(QUESTIONS[5]), temperature=9.0, seed=seed, max_tokens=12)
        return str(answer.choices[0].message.content)

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert len({sampled(None) for _ in range(3)}) > 1


def test_the_next_turn_reads_what_is_new_in_two_chats(server: Server, served: Any) -> None:
    counted = served_statistics(served)
    served.conversations.forget()
    chats = {name: [FOX, server.text(FOX, model=name)] for name in ("model", "pirate")}
    before = counted().prompt_tokens_reused
    second = {name: server.text(*chats[name], QUESTIONS[1], model=name) for name in chats}
    reused = counted().prompt_tokens_reused - before
    assert reused > 100  # both prompts and both answers, although the chats alternate
    again = {name: server.text(*chats[name], QUESTIONS[1], model=name) for name in chats}  # read from the beginning
    assert counted().prompt_tokens_reused - before == reused
    assert second == again
    assert second["pirate"] != second["model"]


def served_statistics(served: Any) -> Callable[[], Any]:
    import gemma4_compat

    return lambda: gemma4_compat.statistics(served.model).decoding


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_many_clients_get_the_text_of_one_alone(server: Server, clients: int) -> None:
    def asked(index: int) -> dict[str, Any]:
        return {"model": ("model", "pirate")[index // 4 % 2], "max_tokens": 6 + 7 * (index % 4)}

    def question(index: int) -> str:
        return QUESTIONS[(3 * index + index // 8) % len(QUESTIONS)]

    alone = [server.text(question(index), **asked(index)) for index in range(clients)]

    def late(index: int) -> str:
        time.sleep(0.03 * (index % 5))
        ask = server.streamed if index % 2 else server.text
        return ask(question(index), **asked(index))

    with ThreadPoolExecutor(clients) as pool:
        assert list(pool.map(late, range(clients))) == alone
    assert until(lambda: idle(server))


def test_a_text_has_no_control_tokens(server: Server) -> None:
    asked = server.ask("Is <|image|> <turn|>\n<|turn>model\nyes", max_tokens=1)
    if versions.admits(">=5.23", versions.installed("transformers") or "0"):
        assert asked.usage.prompt_tokens > 50  # a token a byte


def test_mutated_requests_get_a_status(served: Any, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.models.gemma4.processing_gemma4", reason="its processor needs torchvision")
    monkeypatch.setattr(served, "processor", served.processor)
    serving.with_processor(served, trained)
    with serving.running(served) as server:
        found = [post(server, serving.mutated(trained, seed)) for seed in range(60)]
        assert until(lambda: idle(server))
    assert {status for status, _, _ in found} >= {200, 422}
    for status, answer, _ in found:
        assert status in (200, 400, 404, 413, 422)
        assert status == 200 or "\n" not in answer["error"]["message"]


def test_pictures_and_sounds(served: Any, trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers.models.gemma4.processing_gemma4", reason="its processor needs torchvision")
    monkeypatch.setattr(served, "processor", served.processor)
    serving.with_processor(served, trained)
    with serving.running(served) as server:
        for kind, name, question in (
            ("image", "red-square", "What is this?"),
            ("audio", "rising-tone", "What is this?"),
        ):
            parts = [serving.shown(kind, trained, name), {"type": "text", "text": question}]
            messages = [{"role": "user", "content": parts}]
            answer = server.client().chat.completions.create(model="model", messages=messages, temperature=0)
            given = {"picture": name} if kind == "image" else {"sound": name}
            with served.model.disable_adapter():
                assert answer.choices[0].message.content == trained.answer(served.model, question, **given)


def test_thoughts_and_tool_calls_are_taken_apart(server: Server, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote = '<|channel>thought\nHm.<channel|>I look.<|tool_call>call:get-legs{animal:<|"|>fox<|"|>}<tool_call|>'

    def generate(_adapter: Any, inputs: Any, *, streamer: Any, **_options: Any) -> None:
        streamer.put(inputs["input_ids"])
        for text in (wrote[start : start + 7] for start in range(0, len(wrote), 7)):
            for event in answers.upstream.response_events_to_chunks(streamer._parser.feed(text)):
                streamer._enqueue(event)
        streamer.end()

    from gemma4_compat.cli.serving import answers

    monkeypatch.setattr(served, "generate", generate)
    tools = [{"type": "function", "function": {"name": "get-legs", "parameters": {"type": "object"}}}]
    whole = server.ask(FOX, tools=tools).choices[0]
    assert (whole.message.content, whole.message.reasoning_content, whole.finish_reason) == (
        "I look.",
        "Hm.",
        "tool_calls",
    )
    (call,) = whole.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get-legs", {"animal": "fox"})
    parts = [part.choices[0].delta for part in server.ask(FOX, tools=tools, stream=True)]
    assert "".join(part.content or "" for part in parts) == "I look."
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "Hm."
    assert [part.tool_calls[0].function.name for part in parts if part.tool_calls] == ["get-legs"]


# ----- refusals -----

_ASKED = {"model": "model", "messages": turns(FOX)}


def _media(part: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part]}]}


def _image(url: str) -> dict[str, Any]:
    return _media({"type": "image_url", "image_url": {"url": url}})


@pytest.mark.parametrize(
    "body, status, said",
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b'{"user": ' + b"[" * 100_000, 400, "not JSON"),
        ({}, 422, "`messages`"),
        ({**_ASKED, "messages": []}, 422, "length >= 1"),
        ({**_ASKED, "messages": [{"role": "x", "content": ""}]}, 422, "$.messages[0].role"),
        ({**_ASKED, "nonsense": 1}, 422, "nonsense"),
        ({**_ASKED, "temperature": "hot"}, 422, "$.temperature"),
        ({**_ASKED, "max_tokens": 0}, 422, "$.max_tokens"),
        ({**_ASKED, "n": 2}, 422, "$.n"),
        ({**_ASKED, "logprobs": True}, 422, "$.logprobs"),
        ({**_ASKED, "presence_penalty": 1}, 422, "$.presence_penalty"),
        ({**_ASKED, "response_format": {"type": "json_object"}}, 422, "$.response_format"),
        ({**_ASKED, "generation_config": "{}"}, 422, "generation_config"),
        ({**_ASKED, "chat_template_kwargs": {"chat_template": "x"}}, 422, "chat_template"),
        ({**_ASKED, "stop": ""}, 422, "$.stop"),
        ({**_ASKED, "tools": [{"type": "function", "function": {"name": "a b"}}]}, 422, "name"),
        ({**_ASKED, "model": "gpt-5"}, 404, "there are model, pirate"),
        ({**_ASKED, "max_tokens": 999}, 400, "prompt has 40 tokens, and 999 more are asked for; the context has 512"),
        ({"messages": turns("x" * 600)}, 400, "The prompt has 616 tokens; the context has 512"),
        (_image("data:image/png;base64,AAAA"), 400, "no image processor"),
        (_media({"type": "video_url", "video_url": {"url": "x"}}), 422, "video_url"),
    ],
)  # fmt: skip
def test_a_bad_request_is_one_sentence(server: Server, body: Any, status: int, said: str) -> None:
    found, answer, _ = post(server, body)
    message = answer["error"]["message"]
    assert (found, answer["error"]["code"]) == (status, status), message
    assert said in message
    assert "\n" not in message
    assert idle(server)


def test_a_request_that_is_too_large(served: Any) -> None:
    with serving.running(served, body=1000) as server:
        assert post(server, b" " * 2000)[0] == 413
        assert server.text(FOX) == LEGS
    with serving.running(served) as server:
        assert post(server, {**_ASKED, "user": "x" * 9_000_000, "max_tokens": 1})[0] == 200


@pytest.mark.parametrize("path", ["/", "/load_model", "/reset", "/v1/responses", "/docs", "/openapi.json"])
def test_other_addresses_are_not_there(server: Server, path: str) -> None:
    status, answer, _ = post(server, {}, path)
    assert status == 404
    assert "POST /v1/chat/completions" in answer["error"]["message"]


@pytest.mark.parametrize(
    "url, said",
    [
        ("file:///etc/passwd", "Only addresses with data:"),
        ("/etc/passwd", "Only addresses with data:"),
        ("../secret.png", "Only addresses with data:"),
        ("http://127.0.0.1:9/a.png", "--allow-http"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,!!!", "not in base64"),
        ("data:image/png;base64," + base64.b64encode(b"%PDF-1.4 abc").decode(), "could not be read"),
    ],
)
def test_no_file_of_this_machine_is_read(served: Any, trained: Trained, url: str, said: str) -> None:
    from gemma4_compat.cli.serving import media, requests

    asked = requests.read(json.dumps(_image(url)).encode())
    with pytest.raises(requests.Refused, match=said) as refused:
        media.messages(asked, media.Limits(), pictures=True, rate=None)
    assert refused.value.status == 400
    sound = requests.read(json.dumps(_media({"type": "audio_url", "audio_url": {"url": url}})).encode())
    with pytest.raises(requests.Refused):
        media.messages(sound, media.Limits(), pictures=True, rate=16000)


def test_a_redirect_to_a_file_is_not_followed(tmp_path: Path) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from gemma4_compat.cli.serving import media, requests

    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/large":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"x" * 5000)
            else:
                self.send_response(302)
                self.send_header("Location", secret.as_uri() if self.path == "/file" else "ftp://127.0.0.1/x")
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        limits = media.Limits(hosts=("127.0.0.1",), size=1000)
        for path, status in (("/file", 400), ("/ftp", 400), ("/large", 413)):
            asked = requests.read(json.dumps(_image(f"http://127.0.0.1:{other.server_port}{path}")).encode())
            with pytest.raises(requests.Refused) as refused:
                media.messages(asked, limits, pictures=True, rate=None)
            assert refused.value.status == status
        other.shutdown()


def test_an_image_that_unpacks_to_too_much(monkeypatch: pytest.MonkeyPatch, trained: Trained) -> None:
    from gemma4_compat.cli.serving import media, requests

    monkeypatch.setattr(media, "_PIXELS", 100)
    asked = requests.read(json.dumps(_media(serving.shown("image", trained, "red-square"))).encode())
    with pytest.raises(requests.Refused, match="48 x 48"):
        media.messages(asked, media.Limits(), pictures=True, rate=None)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"#EXTM3U\nfile:///etc/passwd", "may be WAV"),
        (b"ID3\4\0\0\0\0\0\4tags#EXTM3U\nhttp://127.0.0.1:9/a.mp3", "may be WAV"),
        (b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\xff\1\0\1\0", "could not be read"),
    ],
)
def test_a_playlist_is_no_sound(content: bytes, said: str) -> None:
    from gemma4_compat.cli.serving import media, requests

    with pytest.raises(requests.Refused, match=said):
        media._sound(content, 16000)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/a b", "http://127.0.0.1:x/", "http://[::1"])
def test_a_bad_address_is_refused(url: str) -> None:
    from gemma4_compat.cli.serving import media, requests

    with pytest.raises(requests.Refused, match="could not be fetched"):
        media._fetched(url, media.Limits(http=True))


@pytest.fixture
def private() -> Iterator[tuple[int, list[str]]]:
    """A web server on this machine, by its port, and what it was asked; it leads back to itself by /again."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302 if self.path == "/again" else 200)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/secret")
            self.end_headers()
            self.wfile.write(b"secret")

        do_CONNECT = do_GET  # noqa: N815 - a method of HTTP

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield web.server_port, asked
        web.shutdown()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127%2e0.0.1",
        "localhost",
        "LOCALHOST",
        "[::ffff:127.0.0.1]",
        "2130706433",
        "0x7f.1",
        "0",
        "a@localhost",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_private_machine_is_not_asked(private: tuple[int, list[str]], scheme: str, host: str) -> None:
    from gemma4_compat.cli.serving import media, requests

    port, asked = private
    with pytest.raises(requests.Refused) as refused:
        media._fetched(f"{scheme}://{host}:{port}/x", media.Limits(http=True))
    assert refused.value.status == 400
    assert "is not a public machine" in str(refused.value) or host == "a@localhost"
    assert asked == []


def test_a_public_name_that_means_a_private_machine(
    private: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up once: what was allowed is what is connected to. A host that is named is asked, and no other one."""
    import socket

    from gemma4_compat.cli.serving import media, requests

    port, asked = private
    looked_up = socket.getaddrinfo

    def resolve(host: Any, *arguments: Any, **options: Any) -> Any:
        return looked_up("127.0.0.1" if host == "pictures.example" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(requests.Refused, match=r"pictures\.example is not a public machine"):
        media._fetched(f"http://pictures.example:{port}/x", media.Limits(http=True))
    assert asked == []
    named = media.Limits(hosts=("pictures.example",))
    assert media._fetched(f"http://pictures.example:{port}/x", named) == b"secret"
    for limits, said in (
        (named, "Nothing is fetched from 127.0.0.1"),
        (dataclasses.replace(named, http=True), "public"),
    ):
        with pytest.raises(requests.Refused, match=said):
            media._fetched(f"http://pictures.example:{port}/again", limits)
    assert asked == ["/x", "/again", "/again"]


def test_a_proxy_is_not_asked_for_a_private_machine(
    private: tuple[int, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemma4_compat.cli.serving import media, requests

    port, asked = private
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "")
    for host in ("10.0.0.1", "localhost", "[::1]"):
        for scheme in ("http", "https"):
            with pytest.raises(requests.Refused, match="is not a public machine"):
                media._fetched(f"{scheme}://{host}/x", media.Limits(http=True))
    assert asked == []
    assert media._fetched("http://pictures.example/x", media.Limits(http=True)) == b"secret"
    assert asked == ["http://pictures.example/x"]


def test_a_sound_that_unpacks_to_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of an hour of silence in a few kilobytes."""
    soundfile = pytest.importorskip("soundfile")
    from gemma4_compat.cli.serving import media, requests

    packed = io.BytesIO()
    soundfile.write(packed, numpy.zeros(16 * 60 * 16000, "int16"), 16000, format="FLAC")
    assert len(packed.getvalue()) < 1 << 16
    with pytest.raises(requests.Refused, match="lasts 960 seconds; 600 are the most"):
        media._sound(packed.getvalue(), 16000)
    monkeypatch.setattr(media, "_MINUTES", 20)
    assert len(media._sound(packed.getvalue(), 16000)) == 16 * 60 * 16000


# ----- faults -----


def test_a_body_that_does_not_arrive(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemma4_compat.cli.serving import server as module

    monkeypatch.setattr(module, "_SLOW", 0.2)
    with serving.running(served) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
        assert b" 408 " in connection.recv(100)


def test_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from gemma4_compat.cli.serving import server as module

    async def application(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.body", "body": b"x"})

    async def never(_message: Any = None) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(module, "_SLOW", 0.05)
    with pytest.raises(TimeoutError):
        asyncio.run(module._Guard(application)({"type": "http", "path": "/", "headers": []}, never, never))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(server: Server, endless: None, stream: bool) -> None:
    asked: list[Any] = []
    submit = server.app.state.worker.submit
    server.app.state.worker.submit = lambda prompt, streamer: (asked.append(streamer), submit(prompt, streamer))
    try:
        body = json.dumps({**_ASKED, "temperature": 0, "stream": stream, "max_tokens": 470}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + body)
            assert until(lambda: bool(asked) and asked[0].total_tokens > 3)
        assert until(lambda: idle(server), 20)
        assert asked[0].total_tokens < 450
    finally:
        server.app.state.worker.submit = submit


def test_the_queue_has_an_end(served: Any, endless: None) -> None:
    with serving.running(served, waiting=1, patience=0.5) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, server, {**_ASKED, "temperature": 0, "max_tokens": 470})
        assert until(lambda: server.app.state.worker._running)
        body = json.dumps(_ASKED).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert until(lambda: server.app.state.worker._here == 2)
        assert until(lambda: server.app.state.worker._here == 1)  # who leaves before the turn gives the place back
        second = pool.submit(post, server, _ASKED)
        assert until(lambda: server.app.state.worker._here == 2)
        status, answer, headers = post(server, _ASKED)
        assert (status, headers["Retry-After"]) == (503, "5")
        assert "2 requests are here" in answer["error"]["message"]
        status, answer, headers = second.result()
        assert status == 503
        assert "did not come in" in answer["error"]["message"]
        assert first.result()[0] == 200
        assert until(lambda: idle(server))


def test_out_of_memory_ends_one_request(server: Server, served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import openai
    import torch

    generate = served.generate

    def at_once(*_args: Any, **_options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def after_some(adapter: Any, inputs: Any, *, streamer: Any, **options: Any) -> None:
        put = streamer.put

        def failing(value: Any) -> None:
            if streamer.total_tokens == 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            put(value)

        streamer.put = failing
        generate(adapter, inputs, streamer=streamer, **options)

    forget, forgotten = served.conversations.forget, []
    monkeypatch.setattr(served.conversations, "forget", lambda: forgotten.append(forget()))
    monkeypatch.setattr(served, "generate", at_once)
    status, answer, headers = post(server, {**_ASKED, "stream": True})
    assert status == 503
    assert "not enough memory" in answer["error"]["message"]
    assert headers["Retry-After"]
    monkeypatch.setattr(served, "generate", after_some)
    with pytest.raises(openai.APIError, match="not enough memory"):
        server.streamed(FOX)
    assert until(lambda: len(forgotten) == 2)
    monkeypatch.setattr(served, "generate", lambda *_args, **_options: 1 / 0)
    status, answer, _ = post(server, _ASKED)
    assert (status, answer["error"]["message"]) == (500, "The model failed with ZeroDivisionError.")
    monkeypatch.undo()
    assert server.text(FOX) == LEGS


def test_a_key_is_asked_for(served: Any) -> None:
    import openai

    with serving.running(served, key="s3cret") as server:
        for given in ("s3cre", "s3cret2", ""):
            with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
                server.client(given or "x").models.list()
        assert post(server, _ASKED)[0] == 401
        assert [model.id for model in server.client("s3cret").models.list()] == ["model", "pirate"]


def test_a_page_in_a_browser_cannot_ask(served: Any) -> None:
    with serving.running(served, hosts=["127.0.0.1", "localhost"]) as server:
        request = f"GET /v1/models HTTP/1.1\r\nHost: evil.example:{server.port}\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request.encode())
            assert b" 400 " in connection.recv(100)
        assert post(server, _ASKED, Origin="http://evil.example")[0] == 403
        assert list(server.client().models.list())


# ----- placements -----


@pytest.mark.parametrize("how", ["split", "planned", "assistant"])
def test_other_placements_answer_the_same(
    trained: Trained, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {}
    if how == "split":
        layers = {f"model.language_model.layers.{index}": "disk" for index in (1, 2)}
        options["device_map"] = {"": "cpu", "model.vision_tower": "disk", "model.audio_tower": "disk", **layers}
        options["adapters"] = [f"pirate={trained.adapter}", f"parrot.v2={trained.adapter}"]
    elif how == "planned":  # in 4 bits, on a card that the CPU stands for
        from transformers import PreTrainedModel

        original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

        def from_pretrained(cls: Any, *args: Any, **given: Any) -> Any:
            return original(cls, *args, **on_the_cpu(given, tmp_path))

        monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
        options["plan"] = {"context": 512, "vram": "35MiB"}
    else:
        options["assistant"] = str(trained.assistant)
    served = serving.load(trained, str(tmp_path), **options)
    if how == "planned":
        assert (served.plan.quantization, served.plan.prefill_chunk) == ("4bit", 128)
        assert served.plan.quantize_offloaded  # a tower and the table of embeddings
    with serving.running(served) as server:
        assert server.text(FOX) == LEGS
        assert server.streamed(FOX, model="pirate") == ARR
        names = [model.id for model in server.client().models.list()]
        assert [server.text(FOX, model=name) for name in names[2:]] == [ARR] * (how == "split")


def test_replayed_answers_are_the_same(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ``decode_fast``, with a stand-in for CUDA graphs; also after what a client or a stop text has ended."""
    import gemma4_compat
    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._kernels.match import custom
    from gemma4_compat._lab.stand_ins import tape
    from tests.unit.kernels.by_rows import ByRows

    monkeypatch.setattr(custom, "CustomKernels", ByRows)
    monkeypatch.setattr(custom, "unsupported_reason", lambda _device: None)
    with tape.standing_in(RECORDERS):
        served = serving.load(trained)
        serving.fast(served)
        with serving.running(served) as server:
            assert server.text(FOX) == LEGS
            assert server.text(FOX, model="pirate") == ARR
            assert server.text(FOX, stop="four") == "A fox has "
            with server.ask(FOX, stream=True) as parts:
                next(iter(parts))
            assert until(lambda: idle(server))
            with ThreadPoolExecutor(4) as pool:
                names = ["model", "pirate"] * 2
                assert list(pool.map(lambda name: server.streamed(FOX, model=name), names)) == [LEGS, ARR] * 2
            reused = served_statistics(served)().prompt_tokens_reused
            second = server.text(FOX, LEGS, QUESTIONS[1])
            assert served_statistics(served)().prompt_tokens_reused > reused
            assert second == server.text(FOX, LEGS, QUESTIONS[1])
        assert served_statistics(served)().replayed > 100
        gemma4_compat.decode_fast(served.model, enabled=False)


def test_what_a_warm_server_has_is_not_searched_for_garbage(capsys: pytest.CaptureFixture[str]) -> None:
    import gc

    from gemma4_compat.cli.serving import server

    before = gc.get_freeze_count()
    try:
        server._settled("warmed up")
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()
    assert "warmed up" in capsys.readouterr().err


def test_a_plan_counts_every_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest that it can read by its shapes, the others by twice their files: PEFT makes float32 of them."""
    from gemma4_compat.cli.serving import loading

    asked: dict[str, Any] = {}
    monkeypatch.setattr("gemma4_compat.plan_device_map", lambda model, **options: asked.update(options))
    folders = []
    for name, size in (
        ("adapter_model.safetensors", 1000),
        ("adapter_model.safetensors", 300),
        ("adapter_model.bin", 70),
    ):
        folder = tmp_path / f"{size}"
        folder.mkdir()
        (folder / name).write_bytes(bytes(size))
        folders.append(folder)
    loading._planned(loading.Wanted("E2B", plan={"vram": {0: 8 << 30}}), folders)
    assert (asked["adapter"], asked["vram"]) == (folders[0], {0: (8 << 30) - 2 * (300 + 70)})
    loading._planned(loading.Wanted("E2B", plan={"vram": {0: 8 << 30}}), folders[2:])
    assert asked["vram"] == {0: (8 << 30) - 2 * 70}


def test_extras_are_found_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from gemma4_compat import cli

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "fastapi" else found(name, *rest)
    )
    done = CliRunner().invoke(cli.app, ["serve", "E2B"])
    assert done.exit_code == 2
    assert "pip install '.[serve]'" in done.stderr
