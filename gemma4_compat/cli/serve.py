"""``gemma4-compat serve`` and ``gemma4-compat chat``."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gemma4_compat._engine.io import temporary, terminal
from gemma4_compat._engine.io.text import parse_size
from gemma4_compat.cli.app import app, command, fail, tell, working

#: What transformers' server imports.
_EXTRA = ("fastapi", "openai", "pydantic", "uvicorn")
_PREFIX, _SIGNALLED = "gemma4-compat-", 128

_Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="E2B, E4B, 12B, 26B-A4B, 31B, a checkpoint folder, or a model id.")
]
_Adapters = Annotated[
    list[str] | None,
    typer.Option("--adapter", metavar="[NAME=]PATH", help="An adapter, which requests choose by name; repeatable."),
]
_Assistant = Annotated[
    str | None, typer.Option(help="A model that drafts tokens: a folder or an id. Keeps no conversations.")
]
_Card = Annotated[str | None, typer.Option(help="Fit this card, such as 'RTX 3060'.")]
_Vram = Annotated[
    list[str] | None,
    typer.Option(
        help="What PyTorch may allocate, such as 8GiB; repeat it for each GPU. Default: what --card has, or what is "
        "free on this machine's GPUs. Without a GPU, the CPU computes.",
    ),
]
_Context = Annotated[int, typer.Option(help="Tokens per conversation, prompt and answer together.")]
_Quantize = Annotated[
    str | None, typer.Option(help="4bit, 4bit-double, 8bit or none; default: 4bit, and none on a CPU.")
]
_Cpu = Annotated[str | None, typer.Option(help="Host memory for offloaded modules; default: as much as they need.")]
_DeviceMap = Annotated[Path | None, typer.Option(help="A JSON file with a device map, in place of the plan's.")]
_Vision = Annotated[bool, typer.Option("--vision", help="Leave room for images.")]
_Audio = Annotated[bool, typer.Option("--audio", help="Leave room for sounds.")]
_Exact = Annotated[bool, typer.Option("--exact", help="PyTorch's bits, which are slower; keeps no conversations.")]
_Parallel = Annotated[
    int,
    typer.Option(
        help="Answers at a time, decoded together; each has the text of an idle server. Where that cannot be (a CPU, "
        "experts in bf16 or with an adapter, --exact, --assistant), they come one after the other, and a line says "
        "why.",
        min=1,
        max=32,
        metavar="NUMBER",
    ),
]
_Conversations = Annotated[str, typer.Option(help="Host memory for conversations; the last one stays on the GPU.")]


@app.command()
@command("a server")
def serve(
    model: _Model,
    adapter: _Adapters = None,
    card: _Card = None,
    vram: _Vram = None,
    context: _Context = 8192,
    port: Annotated[int, typer.Option(help="TCP port; 0: any free one.", min=0, max=65535, metavar="NUMBER")] = 8000,
    host: Annotated[
        str, typer.Option(help="The address to listen on; one that other machines reach needs --key.")
    ] = "127.0.0.1",
    key: Annotated[
        str | None,
        typer.Option(
            envvar="GEMMA4_COMPAT_KEY",
            show_envvar=False,
            help="What clients must send as api_key; better in GEMMA4_COMPAT_KEY, a variable that others cannot see.",
        ),
    ] = None,
    allow_http: Annotated[
        bool, typer.Option("--allow-http", help="Fetch images and sounds from public addresses in requests.")
    ] = False,
    media_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST", help="Fetch images and sounds from this machine, also if it is private; repeatable."
        ),
    ] = None,
    waiting: Annotated[int, typer.Option(help="Requests that may wait for their turn.", min=0, metavar="NUMBER")] = 64,
    patience: Annotated[
        float, typer.Option(help="Seconds that a request may wait.", min=0.1, metavar="NUMBER")
    ] = 120.0,
    grace: Annotated[int, typer.Option(help="Seconds for running requests at SIGTERM.", min=1, metavar="NUMBER")] = 20,
    assistant: _Assistant = None,
    quantize: _Quantize = None,
    cpu: _Cpu = None,
    device_map: _DeviceMap = None,
    vision: _Vision = False,
    audio: _Audio = False,
    exact: _Exact = False,
    conversations: _Conversations = "2GiB",
    parallel: _Parallel = 1,
) -> None:
    """Serve a model to OpenAI's clients: placed by a plan, with adapters by name, from transformers' own server.

    Answers come one after the other, or --parallel at a time. Needs transformers 5.15 or newer and the extra [serve]
    (docs/SERVING.md).
    """
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        fail(f"{', '.join(missing)}: not installed, and serve needs it; in a checkout: pip install '.[serve]'")
    if not (host in ("localhost", "::1") or host.startswith("127.") or key):
        fail(f"on {host}, everyone who reaches this machine could ask; give --key, or a variable GEMMA4_COMPAT_KEY")
    with _loaded(locals()) as served:
        from gemma4_compat.cli.serving import media, server

        fetched = media.Limits(http=allow_http, hosts=tuple(each.lower() for each in media_host or ()))
        limits = server.Limits(waiting=waiting, patience=patience, parallel=parallel, grace=grace, media=fetched)
        tell(f"serving {', '.join(served.names)}")
        server.run(served, limits, host=host, port=port, key=key or None)


@app.command()
@command("a chat")
def chat(
    model: _Model,
    adapter: _Adapters = None,
    card: _Card = None,
    vram: _Vram = None,
    context: _Context = 8192,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: the likeliest tokens; default: the checkpoint's.", min=0)
    ] = None,
    assistant: _Assistant = None,
    quantize: _Quantize = None,
    cpu: _Cpu = None,
    device_map: _DeviceMap = None,
    exact: _Exact = False,
) -> None:
    """Chat with a model in this terminal, placed and adapted as by `serve`; a pipe gives a turn in each line.

    Ctrl-C ends an answer, /reset begins anew, /use NAME asks the adapter or the model of that name, /quit ends.
    """
    with _loaded(locals()) as served:
        from gemma4_compat.cli.serving import terminal as chats

        chats.Chat(served, system, temperature=temperature).run()


@contextlib.contextmanager
def _loaded(given: dict[str, Any]) -> Iterator[Any]:
    """The model. Its weights on disk are removed at the end, also at SIGTERM, which still ends the process."""
    from gemma4_compat.cli.serving import loading

    names = ("card", "context", "cpu", "vision", "audio", "quantize")
    plan = {name: given[name] for name in names if name in given} | {"vram": given["vram"] or None}
    rows = given.get("parallel", 1) + 1  # prompts are read one at a time, in a cache of their own
    if rows > 2 and not (given["assistant"] or given["exact"]):
        plan |= {"batch": rows, "prompt": max(given["context"] // rows, 1)}
    wanted = loading.Wanted(
        given["model"],
        given["adapter"] or (),
        given["assistant"],
        int(parse_size(given.get("conversations", "2GiB"))),
        exact=given["exact"],
        device_map=None if given["device_map"] is None else _map(given["device_map"]),
        plan=plan,
    )
    loading.refuse(wanted)
    working(f"loading {given['model']}: importing torch and transformers first")
    try:
        with temporary.terminable(), tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
            served = loading.load(wanted, folder)
            terminal.overwrite("")
            yield served
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code > _SIGNALLED:
            signal.raise_signal(ended.code - _SIGNALLED)
        raise


def _map(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = error
    if not isinstance(found, dict) or not found:
        fail(f"{file} is no JSON object from modules to devices" + (f": {found}" if found else ""))
    return dict(found)
