"""The HTTP server: transformers' application with our model, one route of ours, and its limits."""

from __future__ import annotations

import asyncio
import gc
import hmac
import inspect
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall
from openai.types.chat.chat_completion_message_tool_call import ChatCompletionMessageToolCall
from openai.types.completion_usage import CompletionUsage
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers.cli.serving import chat_completion, model_manager, server, utils

from gemma4_compat.cli.app import tell
from gemma4_compat.cli.serving import answers, media, requests, together
from gemma4_compat.cli.serving.loading import Served
from gemma4_compat.cli.serving.requests import Refused

#: What is left of transformers' routes; others load any model, or unload this one.
_KEPT = ("/v1/models", "/health")
_SLOW = 60.0  # seconds for a body to arrive, and for a part of an answer to leave
_log = logging.getLogger("gemma4_compat")
_LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Limits:
    """What the server takes: bytes of a request, requests that wait, seconds that one waits, connections at a time.

    ``parallel``: answers at a time. ``grace``: seconds that running requests have when the server is told to end.
    """

    body: int = 64 << 20
    waiting: int = 64
    patience: float = 120.0
    parallel: int = 1
    grace: int = 20
    connections: int = 256
    media: media.Limits = field(default_factory=media.Limits)


class _Models(model_manager.ModelManager):  # type: ignore[misc]
    """The names that requests may ask for, all of one loaded model."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self._served = served

    def list_models(self, *_args: Any) -> list[dict[str, Any]]:
        root = next(iter(self._served.names))
        return [
            {"id": name, "object": "model", "created": 0, "owned_by": "local", "root": root}
            | {"parent": None if adapter is None else root, "max_model_len": self._served.plan.context}
            for name, adapter in self._served.names.items()
        ]

    get_gen_models = list_models  # before transformers 5.17


class _Chat(chat_completion.ChatCompletionHandler):  # type: ignore[misc]
    """``POST /v1/chat/completions``: our checks, prompts and thread around transformers' responses."""

    def __init__(self, served: Served, models: _Models, state: Any, limits: Limits) -> None:
        super().__init__(models, state)
        self._limits, self._names = limits, served.names
        self._preparation = answers.Preparation(served, limits.media)
        self.worker = _worker(served, limits)

    async def answer(self, http: Request) -> Any:
        asked = requests.read(await _body(http, self._limits.body))
        name = requests.named(asked.model, self._names)
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.worker.enter()
        try:
            prompt = await asyncio.to_thread(self._preparation.prompt, asked)
            streamer = self._preparation.streamer(prompt, asyncio.get_running_loop(), queue)
        except BaseException:
            self.worker.leave()
            raise
        self.worker.submit(prompt, streamer)
        reply = _Reply(self, http.state.request_id, name, prompt, streamer, queue)
        gone = asyncio.create_task(_gone(http, queue))
        try:
            reply.early = await self._turn(queue, streamer)
            first = await reply.item()  # what fails before it has a status of its own
            if asked.stream:
                return _Stream(reply, first)
            return await reply.whole(first)
        except BaseException:
            self.worker.drop(streamer)
            raise
        finally:
            gone.cancel()

    async def _turn(self, queue: asyncio.Queue[Any], streamer: answers.Streamer) -> list[Any]:
        """Wait for the turn; what the parser found in the prompt comes before it."""
        early: list[Any] = []
        try:
            with anyio.fail_after(self._limits.patience + 1):
                while (item := await queue.get()) is not answers.BEGUN:
                    if isinstance(item, Refused):
                        raise item
                    early.append(item)
        except TimeoutError:
            self.worker.drop(streamer)
            raise self.worker.late() from None
        return early


def _worker(served: Served, limits: Limits) -> answers.Worker:
    options: dict[str, Any] = {"waiting": limits.waiting, "patience": limits.patience}
    if limits.parallel == 1:
        return answers.Worker(served, **options)
    reason = together.unsupported_reason(served)
    if reason is None:
        return together.Together(served, limits.parallel, **options)
    _log.warning("gemma4_compat: answers come one after the other: %s", reason)
    return answers.Worker(served, **options)


@dataclass
class _Reply:
    """An answer on its way to a client."""

    handler: _Chat
    id: str
    model: str
    prompt: answers.Prompt
    streamer: answers.Streamer
    queue: asyncio.Queue[Any]
    calls: int = 0
    early: list[Any] = field(default_factory=list)

    async def item(self) -> Any:
        """The next part: text, a thought, a tool call; None at the end."""
        found = self.early.pop(0) if self.early else await self.queue.get()
        if isinstance(found, Refused):
            raise found
        return found

    async def _items(self, first: Any) -> AsyncIterator[Any]:
        item = first
        while item is not None:
            yield item
            item = await self.item()

    def _call(self, item: utils.ToolCall, kind: Any, **more: Any) -> Any:
        self.calls += 1
        function = {"name": item.name, "arguments": item.arguments}
        return kind(id=f"call_{self.id}_{self.calls - 1}", type="function", function=function, **more)

    def _end(self) -> dict[str, Any]:
        """Why it ended, and its tokens."""
        most, read, written = self.prompt.config.max_new_tokens, self.prompt.tokens, self.streamer.total_tokens
        reason = "tool_calls" if self.calls else "length" if self.streamer.reached(most) else "stop"
        usage = CompletionUsage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)
        return {"finish_reason": reason, "usage": usage}

    async def whole(self, first: Any) -> JSONResponse:
        """The answer at once."""
        text: list[str] = []
        thoughts: list[str] = []
        calls = []
        async for item in self._items(first):
            if isinstance(item, utils.ToolCall):
                calls.append(self._call(item, ChatCompletionMessageToolCall))
            else:
                (thoughts if isinstance(item, utils.ReasoningText) else text).append(item)
        thought = "".join(thoughts) if thoughts else None
        made = self.handler._build_completion(
            self.id, "".join(text), self.model, tool_calls=calls or None, reasoning_content=thought, **self._end()
        )
        return JSONResponse(made)

    async def events(self, first: Any) -> AsyncIterator[str]:
        """The answer in parts, as server-sent events."""

        def chunk(**given: Any) -> str:
            return str(self.handler._build_chunk_sse(self.id, model=self.model, **given))

        try:
            yield chunk(role="assistant")
            async for item in self._items(first):
                if isinstance(item, utils.ToolCall):
                    yield chunk(tool_calls=[self._call(item, ChoiceDeltaToolCall, index=self.calls)])
                elif isinstance(item, utils.ReasoningText):
                    yield chunk(reasoning_content=item)
                else:
                    yield chunk(content=item)
            yield chunk(**self._end())
        except Refused as refused:
            yield f"data: {JSONResponse(refused.as_data()).body.decode()}\n\n"
        yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):  # type: ignore[misc]
    """Server-sent events. However they end, generation ends then: a client may go away at any time."""

    def __init__(self, reply: _Reply, first: Any) -> None:
        super().__init__(reply.events(first), media_type="text/event-stream")
        self._streamer = reply.streamer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streamer.cancel()


async def _gone(http: Request, queue: asyncio.Queue[Any]) -> None:
    """Refuse an answer if its client goes away, which ends it."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    queue.put_nowait(Refused(499, "The client went away."))


async def _body(http: Request, most: int) -> bytes:
    """The body, within limits of bytes and of time."""
    body, closes = bytearray(), {"Connection": "close"}
    try:
        with anyio.fail_after(_SLOW):
            async for chunk in http.stream():
                body.extend(chunk)
                if len(body) > most:
                    raise Refused(413, f"The request has more than {most >> 20} MiB.", closes)
    except TimeoutError:
        raise Refused(408, f"The request did not arrive within {_SLOW:.0f} seconds.", closes) from None
    return bytes(body)


def _response(refused: Refused) -> JSONResponse:
    return JSONResponse(refused.as_data(), status_code=refused.status, headers=refused.headers)


async def _refuse(http: Request, error: Exception) -> JSONResponse:
    if isinstance(error, HTTPException):
        there = "POST /v1/chat/completions, GET /v1/models and GET /health"
        error = Refused(error.status_code, f"There is no {http.method} {http.url.path[:100]} here; there are {there}.")
    assert isinstance(error, Refused)
    return _response(error)


class _Guard:
    """Around the application: who may ask, and no client that stops reading."""

    def __init__(self, app: Any, key: str | None = None) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            with anyio.fail_after(_SLOW):
                await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refused = None if scope["path"] == "/health" else self._refusal(dict(scope["headers"]))
        await (self._app if refused is None else _response(refused))(scope, receive, sent)

    def _refusal(self, headers: dict[bytes, bytes]) -> Refused | None:
        if self._key is None:
            return Refused(403, "A page in a browser needs a key.") if b"origin" in headers else None
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key.encode()):
            return None
        return Refused(401, "The key is missing or wrong.", {"WWW-Authenticate": "Bearer"})


def application(served: Served, limits: Limits, *, key: str | None = None, hosts: list[str] | None = None) -> Any:
    """The application of transformers, with this model only.

    Args:
        served: the model.
        limits: of requests.
        key: what clients must send; None: nothing.
        hosts: the names by which it may be asked; None: any. A page in a browser of this machine cannot pretend then.

    Returns:
        a FastAPI application; ``state.worker`` generates.
    """
    models, state = _Models(served), utils.GenerationState()
    chat = _Chat(served, models, state, limits)
    handlers = [name for name in inspect.signature(server.build_server).parameters if name.endswith("_handler")]
    app: FastAPI = server.build_server(
        models, generation_state=state, **(dict.fromkeys(handlers) | {"chat_handler": chat})
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) in _KEPT]
    app.post("/v1/chat/completions", response_model=None)(chat.answer)
    app.state.worker = chat.worker

    app.add_exception_handler(Refused, _refuse)
    app.add_exception_handler(HTTPException, _refuse)
    if hosts is not None:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    app.add_middleware(_Guard, key=key)
    return app


def _settled(text: str) -> None:
    """Say that the server is warm. What it has by then stays, and Python does not search that for garbage again."""
    gc.collect()
    gc.freeze()
    tell(text)


def run(served: Served, limits: Limits, *, host: str, port: int, key: str | None) -> None:
    """Serve until SIGTERM or Ctrl-C; running requests have a limit of time then."""
    hosts = None if key is not None else [*_LOCAL, "[::1]", host]
    app = application(served, limits, key=key, hosts=hosts)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        timeout_graceful_shutdown=limits.grace,
        limit_concurrency=limits.connections,
    )
    app.state.worker.prepare(_settled)
    try:
        uvicorn.Server(config).run()
    finally:
        app.state.worker.stop()
