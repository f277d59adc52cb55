"""Answers: a prompt from messages, tokens to text as they come, and the one thread that generates."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving import utils as upstream

from gemma4_compat.cli.serving import media, requests, warm_up
from gemma4_compat.cli.serving.loading import Served
from gemma4_compat.cli.serving.requests import Refused

_log = logging.getLogger("gemma4_compat")
#: The first item of each answer: its turn has come.
BEGUN = object()
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Streamer(upstream.DirectStreamer):  # type: ignore[misc]
    """transformers' streamer, which also ends an answer before a stop text.

    Args:
        stops: texts.
        ends: tokens that end an answer.
        rest: as for transformers': tokenizer, loop, queue, and the parser of thoughts and tool calls.
    """

    def __init__(self, stops: Sequence[str], ends: Sequence[int], *rest: Any, response_parser: Any = None) -> None:
        self._stops, self._ends, self._held, self._final = stops, set(ends), "", -1
        self.stopped = False
        super().__init__(*rest, response_parser=response_parser)

    def reached(self, most: int) -> bool:
        """Whether only the number of tokens ended the answer."""
        return not self.stopped and self._final not in self._ends and self.total_tokens >= most

    def is_end(self, token: int) -> bool:
        """Whether an answer ends with this token."""
        return token in self._ends

    def put(self, value: Any) -> None:
        """Take tokens; ``generate`` calls it."""
        self._final = value.flatten()[-1].item()
        super().put(value)

    def _enqueue(self, item: Any) -> None:
        if isinstance(item, str) and not isinstance(item, upstream.ReasoningText) and self._stops:
            (shown, self._held), self.stopped = _cut(self._held + item, self._stops)
            if shown:
                super()._enqueue(shown)
            if self.stopped:
                raise upstream._GenerationCancelled
            return
        if self._held:
            super()._enqueue(self._held)
            self._held = ""
        if item is not None:  # the worker ends the queue
            super()._enqueue(item)


def _cut(text: str, stops: Sequence[str]) -> tuple[tuple[str, str], bool]:
    """What of a text may be shown, what may be the beginning of a stop text, and whether it ends here."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    if places:
        return (text[: min(places)], ""), True
    lengths = (
        size for stop in stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])
    )
    held = max(lengths, default=0)
    return (text[: len(text) - held], text[len(text) - held :]), False


@dataclass
class Prompt:
    """What is generated from.

    Attributes:
        adapter: whose answer it is; None: the base's.
        inputs: of ``generate``, on the CPU.
        text: the whole prompt, if thoughts and tool calls are looked for.
        config: of ``generate``.
        seed: of sampling.
        stops: texts before which it ends.
    """

    adapter: str | None
    inputs: dict[str, Any]
    text: str
    config: Any
    seed: int
    stops: list[str]

    @property
    def tokens(self) -> int:
        """Tokens that the model reads."""
        return int(self.inputs["input_ids"].shape[-1])


class Preparation:
    """Makes prompts, one at a time: a tokenizer is not made for several threads, so answers have their own.

    Args:
        served: the model.
        limits: of images and sounds.
    """

    def __init__(self, served: Served, limits: media.Limits) -> None:
        from transformers.cli.serving.model_manager import ModelManager

        self.served, self._limits, self._lock = served, limits, threading.Lock()
        self._modality = ModelManager.get_model_modality(served.base, processor=served.processor)
        self._parser = _template(served)
        self._reader = copy.deepcopy(served.tokenizer._tokenizer)
        # From 5.21 or, with images, 5.23 on: a text that a client sends has no control tokens.
        self._takes = inspect.signature(served.processor.apply_chat_template).parameters
        config, processor = served.base.config, served.processor
        extractor = getattr(processor, "feature_extractor", None)
        hears = self._modality is upstream.Modality.MULTIMODAL and getattr(config, "audio_config", None) is not None
        self._rate = int(extractor.sampling_rate) if hears and extractor is not None else None
        self._sees = self._modality is not upstream.Modality.LLM and hasattr(processor, "image_processor")

    def prompt(self, asked: requests.Chat) -> Prompt:
        """The prompt of a request.

        Raises:
            Refused: with the reason.
        """
        import msgspec

        adapter = self.served.names[requests.named(asked.model, self.served.names)]
        said = media.messages(asked, self._limits, pictures=self._sees, rate=self._rate)
        options = asked.template_options if "enable_thinking" in str(self.served.processor.chat_template) else {}
        if "sanitize_control_tokens" in self._takes:
            options["sanitize_control_tokens"] = True
        tools = None if asked.tool_choice == "none" or not asked.tools else msgspec.to_builtins(asked.tools)
        try:
            given = upstream.BaseHandler.get_processor_inputs_from_messages(said, self._modality)
            with self._lock:
                inputs = self.served.processor.apply_chat_template(
                    given,
                    add_generation_prompt=True,
                    tools=tools,
                    return_tensors="pt",
                    return_dict=True,
                    tokenize=True,
                    **options,
                )
                ids = inputs["input_ids"][0]
                text = "" if self._parser is None else self.served.tokenizer.decode(ids)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            sentence = str(error).strip().partition("\n")[0]
            raise Refused(400, f"The chat template or the processor refuses this: {sentence[:300]}") from None
        seed = int.from_bytes(os.urandom(7), "little") if asked.seed is None else asked.seed
        return Prompt(adapter, dict(inputs), text, self._config(asked, inputs), seed, asked.stops)

    def _config(self, asked: requests.Chat, inputs: Mapping[str, Any]) -> Any:
        config, tokens = copy.deepcopy(self.served.base.generation_config), inputs["input_ids"].shape[-1]
        left = self.served.plan.context - tokens
        if left < 1 or left < (asked.most or 1):
            wanted = f", and {asked.most} more are asked for" if asked.most else ""
            raise Refused(400, f"The prompt has {tokens} tokens{wanted}; the context has {self.served.plan.context}.")
        config.max_new_tokens, config.max_length = asked.most or left, None
        for name in _SAMPLING:
            if (value := getattr(asked, name)) is not None:
                setattr(config, name, value)
        if asked.temperature is not None:
            config.do_sample = asked.temperature > 0
        if not config.do_sample:
            requests.choose_likeliest(config)
        if "pixel_values" not in inputs and "input_features" not in inputs:
            config.prefill_chunk_size = self.served.plan.prefill_chunk
        return config

    def streamer(self, prompt: Prompt, loop: Any, queue: Any) -> Streamer:
        """What takes the tokens of an answer, and puts its parts into a queue."""
        parser = None if self._parser is None else upstream.ResponseParser(self._parser, prefix=prompt.text)
        if parser is not None and _is_answer(parser.initial_events):
            parser = None
        ends = prompt.config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return Streamer(prompt.stops, ends, self._reader, loop, queue, response_parser=parser)


def _template(served: Served) -> Any:
    """How thoughts and tool calls are marked: as the tokenizer says, or transformers of a Gemma 4.

    transformers knows it for ``gemma4`` only, not for the 12B or text models, and takes no ``-`` in a function's name.
    """
    found = getattr(served.tokenizer, "response_template", None)
    if found is None:
        known = upstream._RESPONSE_TEMPLATE_FALLBACKS
        found = copy.deepcopy(next((template for types, template in known.items() if "gemma4" in types), None))
    calls = (found or {}).get("fields", {}).get("tool_calls", {})
    if "open_pattern" in calls:
        calls["open_pattern"] = calls["open_pattern"].replace(r"(?P<name>\w+)", r"(?P<name>[\w.-]+)")
    return found


def _is_answer(events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a parser takes the prompt for an answer: it is made for another chat template."""
    return any(event["type"] == "region_chunk" and event["field"] == "content" for event in events)


class Worker:
    """Generates one answer after the other, in one thread: replays belong to the thread of their capture.

    Args:
        served: the model.
        waiting: requests that may wait for their turn.
        patience: seconds that one may wait.

    Attributes:
        prepared: whether :meth:`prepare` has ended.
    """

    prepared = False

    def __init__(self, served: Served, *, waiting: int = 64, patience: float = 120.0) -> None:
        self._served, self._most, self.patience = served, waiting + 1, patience
        self._thread, self._lock, self._here = upstream.InferenceThread(), threading.Lock(), 0
        self._running: set[Streamer] = set()
        self._waiting: set[Streamer] = set()
        self._prepares = self._stopped = False

    def enter(self) -> None:
        """Take a place in the queue, which :meth:`leave` or the end of an answer gives back.

        Raises:
            Refused: the queue is full (503).
        """
        with self._lock:
            if self._here >= self._most:
                raise Refused(503, f"{self._here} requests are here already; try again later.", {"Retry-After": "5"})
            self._here += 1

    def leave(self) -> None:
        """Give a place back."""
        with self._lock:
            self._here -= 1

    def late(self) -> Refused:
        """What a request is told whose turn has not come in time."""
        return Refused(503, f"The turn of this request did not come in {self.patience:.0f} s.", {"Retry-After": "10"})

    def submit(self, prompt: Prompt, streamer: Streamer) -> None:
        """Have an answer generated in its turn; its place is given back then."""
        with self._lock:
            self._waiting.add(streamer)
        self._thread.submit(self._do, prompt, streamer, time.monotonic() + self.patience)

    def prepare(self, say: Callable[[str], None] = _log.debug) -> None:
        """Do between requests what the first ones would wait for, and say so once that is done."""
        warm_up.make_room(self._served)
        self._thread.submit(self._prepare_next, self._pieces(), functools.partial(say, "warmed up"))

    def _pieces(self) -> Iterator[None]:
        """What there is to do, in pieces."""
        yield from warm_up.prompts(self._served)
        yield from warm_up.texts(self._served, self._waiting)

    def _prepare_next(self, pieces: Iterator[None], done: Callable[[], None]) -> None:
        """Do one piece, then what has come meanwhile, then the next piece."""
        more: list[None] = []
        if self._stopped:
            return
        self._prepares = True
        failed = self._failure_of("preparing answers", lambda: more.extend(itertools.islice(pieces, 1)))
        self._prepares = False
        if more:
            self._thread.submit(self._prepare_next, pieces, done)
            return
        self.prepared = True
        if failed is None:
            done()
        else:
            _log.warning("gemma4_compat: the first answers will take longer: %s", failed.sentence)

    def drop(self, streamer: Streamer) -> None:
        """End an answer that nobody wants any longer: at its next token, or before its turn."""
        streamer.cancel()
        with self._lock:
            if streamer in self._waiting:
                self._waiting.remove(streamer)
                self._here -= 1

    def stop(self, seconds: float = 5.0) -> None:
        """End what runs at its next token, and wait for that."""
        self._stopped = True
        for streamer in [*self._running]:
            streamer.cancel()
        until = time.monotonic() + seconds
        while (self._running or self._prepares) and time.monotonic() < until:
            time.sleep(0.02)

    def _do(self, prompt: Prompt, streamer: Streamer, until: float) -> None:
        with self._lock:
            if streamer not in self._waiting:
                return
            self._waiting.remove(streamer)
        failed: Refused | None = self.late()
        try:
            if self._begun(streamer, until):
                failed = self._generate(prompt, streamer)
        finally:
            self._ended(streamer, failed)

    def _begun(self, streamer: Streamer, until: float) -> bool:
        """Tell a request that its turn has come; False if that is too late."""
        if time.monotonic() > until:
            return False
        self._running.add(streamer)
        streamer._enqueue(BEGUN)
        return True

    def _ended(self, streamer: Streamer, failed: Refused | None) -> None:
        self._running.discard(streamer)
        self.leave()
        streamer._loop.call_soon_threadsafe(streamer._queue.put_nowait, failed)

    def _generate(self, prompt: Prompt, streamer: Streamer) -> Refused | None:
        """Generate; None if that went well or nobody wants it any longer, which is no failure."""
        import torch

        def generate() -> None:
            torch.manual_seed(prompt.seed)
            options = {"generation_config": prompt.config, "streamer": streamer}
            self._served.generate(prompt.adapter, prompt.inputs, **options)

        return self._failure_of(f"this request, whose prompt has {prompt.tokens} tokens", generate)

    def _failure_of(self, what: str, action: Callable[..., None], *args: Any) -> Refused | None:
        """Do something; what requests are told if that fails. ``what`` may need too much memory."""
        import torch

        try:
            action(*args)
        except upstream._GenerationCancelled:
            return None
        except (torch.OutOfMemoryError, MemoryError):
            failed = Refused(503, f"There is not enough memory for {what}.", {"Retry-After": "10"})
        except Exception as error:  # noqa: BLE001 - the server goes on, and the request gets its status
            _log.exception("gemma4_compat: a request failed")
            return Refused(500, f"The model failed with {type(error).__name__}.")
        else:
            return None
        # Not in the handler: the error holds what the forward had.
        if self._served.conversations is not None:
            self._served.conversations.forget()
        gc.collect()
        upstream.reset_torch_cache()
        return failed
