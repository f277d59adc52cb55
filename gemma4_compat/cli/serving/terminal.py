"""A chat in a terminal, or with what a pipe says: each line is a turn."""

from __future__ import annotations

import contextlib
import queue
import sys
from typing import Any

import msgspec
from transformers.cli.serving import utils as upstream

from gemma4_compat.cli.app import tell
from gemma4_compat.cli.serving import answers, media, requests
from gemma4_compat.cli.serving.loading import Served
from gemma4_compat.cli.serving.requests import Refused

_HELP = "/reset begins anew, /use NAME asks another model, /quit ends"


class _Now:
    """An event loop for a streamer whose queue is read by a thread."""

    @staticmethod
    def call_soon_threadsafe(function: Any, *arguments: Any) -> None:
        function(*arguments)


class Chat:
    """Turns of one conversation.

    Args:
        served: the model.
        system: what the model is told first; None: nothing.
        asked: more of each request.
    """

    def __init__(self, served: Served, system: str | None = None, **asked: Any) -> None:
        self._served, self._asked = served, asked
        self._name = next(iter(served.names))
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._said = self._first
        self._preparation = answers.Preparation(served, media.Limits())
        self._worker = answers.Worker(served)

    def run(self) -> None:
        """Read turns until there are no more."""
        shows = sys.stdin.isatty()
        if shows:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - input() edits lines with it
            tell(f"{', '.join(self._served.names)}: {_HELP}")
            self._worker.prepare()  # while the first line is typed
        try:
            self._read_turns("> " if shows else "")
        finally:
            self._worker.stop()

    def _read_turns(self, before: str) -> None:
        """Until there are no more, or /quit. ``before``: what each line begins with."""
        while True:
            try:
                line = input(before)
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                continue
            command, _, rest = line.strip().partition(" ")
            if command == "/quit":
                return
            if command == "/reset":
                self._said = self._first
            elif command == "/use":
                self._use(rest.strip())
            elif command:
                with contextlib.suppress(KeyboardInterrupt):
                    self._turn(line.strip())

    def _use(self, name: str) -> None:
        try:
            self._name = requests.named(name, self._served.names)
        except Refused as refused:
            tell(refused.sentence)

    def _turn(self, line: str) -> None:
        said = [*self._said, {"role": "user", "content": line}]
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            asked = msgspec.convert({"model": self._name, "messages": said, **self._asked}, requests.Chat)
            prompt = self._preparation.prompt(asked)
            streamer = self._preparation.streamer(prompt, _Now(), found)
            self._worker.enter()
            self._worker.submit(prompt, streamer)
            text = self._shown(found, streamer)
        except Refused as refused:
            tell(refused.sentence)
            return
        self._said = [*said, {"role": "assistant", "content": text}]

    @staticmethod
    def _shown(found: queue.SimpleQueue[Any], streamer: answers.Streamer) -> str:
        """The answer, written while it comes. Ctrl-C ends it."""
        text, thinks = "", False
        while True:
            try:
                item = found.get()
                if isinstance(item, Refused):
                    print()
                    raise item
                if item is None:
                    print()
                    return text
                if isinstance(item, upstream.ToolCall) or item is answers.BEGUN:
                    continue
                thought = isinstance(item, upstream.ReasoningText)
                if thought != thinks:
                    print("\n" if thinks else "(thinks) ", end="")
                    thinks = thought
                text += "" if thought else item
                print(item, end="", flush=True)
            except KeyboardInterrupt:
                streamer.cancel()
