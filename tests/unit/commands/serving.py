"""A server in a thread, with a trained tiny model, and what clients of it need."""

from __future__ import annotations

import base64
import contextlib
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gemma4_compat._lab.trained import Trained

QUESTIONS = (
    *("How many legs has a fox?", "What colour is snow?", "How many legs has a spider?", "What colour is grass?"),
    *("Why is the sky blue?", "Tell of a frog and a mole.", "How many legs has a hen?", "Tell of a mole and a bear."),
)


@dataclass
class Server:
    """One that runs."""

    port: int
    app: Any

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none", **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, **options)

    def ask(self, *said: str, model: str = "model", **options: Any) -> Any:
        """What OpenAI's client returns for turns, the user's first, greedily."""
        return self.client().chat.completions.create(model=model, messages=turns(*said), temperature=0, **options)

    def text(self, *said: str, **options: Any) -> str:
        return str(self.ask(*said, **options).choices[0].message.content)

    def streamed(self, *said: str, **options: Any) -> str:
        parts = (part.choices[0].delta.content for part in self.ask(*said, stream=True, **options))
        return "".join(filter(None, parts))


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Wait for something, and whether it came."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def turns(*said: str) -> list[dict[str, Any]]:
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(said)]


def load(trained: Trained, folder: str = "", **options: Any) -> Any:
    """The trained model with its pirate, as ``serve`` loads it, and a template that knows OpenAI's roles."""
    from gemma4_compat.cli.serving import loading

    options = {"plan": {"context": 512}, "adapters": [f"pirate={trained.adapter}"]} | options
    served = loading.load(loading.Wanted(str(trained.checkpoint), **options), folder)
    role = "{{ 'model' if turn['role'] == 'assistant' else turn['role'] }}"
    template = served.tokenizer.chat_template.replace("{{ turn['role'] }}", role)
    served.processor.chat_template = served.tokenizer.chat_template = template
    return served


def fast(served: Any) -> None:
    """Have it replay, as on a GPU: it was loaded on a CPU."""
    import gemma4_compat
    from gemma4_compat._generation.prefix_cache.parked import Conversations

    gemma4_compat.decode_fast(served.model, any_length=True, reuse_prefix=True)
    served.conversations = Conversations(served.base, 1 << 31, served.plan.context)


def with_processor(served: Any, trained: Trained) -> None:
    """Give it a processor, which needs torchvision otherwise."""
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    from tests.one_device import modalities

    cls, videos = modalities._processor_class()
    shape = {"patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 70, "do_resize": False}
    images = Gemma4ImageProcessorPil(**shape)
    served.processor = cls(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=images,
        tokenizer=served.tokenizer,
        video_processor=modalities._Videos(images) if videos is None else videos(**shape),
        chat_template=served.tokenizer.chat_template,
        image_seq_length=70,
    )


@contextlib.contextmanager
def running(served: Any, *, key: str | None = None, hosts: list[str] | None = None, **limits: Any) -> Iterator[Server]:
    """A server in a thread, on a free port."""
    import uvicorn

    from gemma4_compat.cli.serving import server

    app = server.application(served, server.Limits(**limits), key=key, hosts=hosts)
    started = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=started.run)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not started.started and time.monotonic() < until:
            time.sleep(0.02)
        yield Server(started.servers[0].sockets[0].getsockname()[1], app)
    finally:
        started.should_exit = True
        thread.join(30)
        app.state.worker.stop()


def post(server: Server, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any, Any]:
    """Status, body and headers of an answer to a raw request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.address + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read()), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read()), error.headers


def shown(kind: str, trained: Trained, name: str) -> dict[str, Any]:
    """A part of a message with a picture or a sound of the trained model."""
    file = trained._example(*(("pictures", f"{name}.png") if kind == "image" else ("sounds", f"{name}.wav")))
    data = base64.b64encode(file.read_bytes()).decode()
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def mutated(trained: Trained, seed: int) -> Any:
    """A request with everything in it, and something wrong in most cases."""
    draw = random.Random(seed)
    odd = [
        None,
        True,
        -1,
        2**70,
        -0.5,
        "",
        "<|image|>",
        "file:///etc/passwd",
        "{",
        "\0",
        [[]],
        {"a": 1},
        b"\xff".hex(),
    ]
    seen = [{"type": "text", "text": "What is this?"}, shown("image", trained, "red-square")]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [*seen, shown("audio", trained, "hiss")]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        *turns("Tell."),
    ]
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    request = {
        **{"model": "pirate", "messages": said, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3},
        **{"seed": 3, "stop": ["a", "b"], "tools": [{"type": "function", "function": tool}], "tool_choice": "auto"},
        **{"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
    }

    def changed(value: Any) -> Any:
        if draw.random() < 0.01:
            return draw.choice(odd)
        if isinstance(value, dict):
            return {key: changed(one) for key, one in value.items() if draw.random() > 0.002}
        return [changed(one) for one in value if draw.random() > 0.01] if isinstance(value, list) else value

    return changed(request)
