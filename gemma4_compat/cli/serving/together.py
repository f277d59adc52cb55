"""Several answers at a time: each prompt is read by itself, then the texts are decoded together, token by token.

While a step computes, the tokens of the last one go to their clients. A text that has ended there takes part in the
step that runs, whose token for it nobody sees.
"""

from __future__ import annotations

import collections
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import LogitsProcessor

from gemma4_compat._engine.runtime.host_copy import HostCopy
from gemma4_compat._generation import continuous
from gemma4_compat._generation.prefix_cache.conversation import Conversation
from gemma4_compat._generation.sampling import best_words
from gemma4_compat.cli.serving import requests, warm_up
from gemma4_compat.cli.serving.answers import Prompt, Streamer, Worker
from gemma4_compat.cli.serving.loading import Served
from gemma4_compat.cli.serving.requests import Refused

#: Words that matter for a token at least, those of Gemma's top-k: greedy and sampled texts share graphs.
_WORDS = 64


class _Logits(LogitsProcessor):  # type: ignore[misc]
    """Notes the logits of the first token, [1, vocabulary]."""

    found: Any = None

    def __call__(self, _ids: Any, scores: Any) -> Any:
        if self.found is None:
            self.found = scores.clone()
        return scores


@dataclass(eq=False)
class _Answer:
    """An answer that is being written.

    Attributes:
        until: when its turn is too late.
        config: of ``generate``, with every default.
        processors: of logits.
        words: that matter for its next token: see ``best_words.most``.
        generator: of random numbers, as after ``torch.manual_seed``.
        ids: the prompt and the answer, int64 [1, room], on the model's device, for processors.
        tokens: of the answer, as far as its client has them.
        conversation: that its next turn will continue.
    """

    prompt: Prompt
    streamer: Streamer
    until: float
    config: Any = None
    processors: Any = None
    words: int | str = 1
    generator: Any = None
    ids: Any = None
    drawn: int = 0
    tokens: list[int] = field(default_factory=list)
    conversation: Conversation | None = None

    def prepare(self, model: Any) -> None:
        """Find how its tokens are chosen, as ``generate`` would."""
        import torch
        from transformers import LogitsProcessorList

        ids, device = self.prompt.inputs["input_ids"], model.device
        self.config, _ = model._prepare_generation_config(self.prompt.config)
        model._prepare_special_tokens(self.config, True, device=device)
        given = {"input_ids_seq_length": ids.shape[1], "device": device, "logits_processor": LogitsProcessorList()}
        self.processors = model._get_logits_processor(generation_config=self.config, **given)
        self.words = best_words.most(self.processors, self.config)
        self.generator = torch.Generator(device).manual_seed(self.prompt.seed)
        self.ids = torch.empty((1, ids.shape[1] + self.config.max_new_tokens), dtype=ids.dtype, device=device)
        self.ids[:, : ids.shape[1]] = ids

    @property
    def chooses_likeliest(self) -> bool:
        """Whether the token is the one with the largest logit."""
        return not self.config.do_sample and not self.processors

    def token(self, logits: Any) -> Any:
        """The next token, int64 [1], from logits [1, vocabulary]."""
        import torch

        scores = self.processors(self.ids[:, : self.prompt.tokens + self.drawn], logits.float())
        if not self.config.do_sample:
            return scores.argmax(dim=-1)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=self.generator)[:, 0]

    def note(self, token: Any) -> None:
        """Have its token, int64 [1], on the model's device, as the last one of its text."""
        if self.drawn < self.config.max_new_tokens:
            at = self.prompt.tokens + self.drawn
            self.ids[:, at : at + 1] = token
        self.drawn += 1

    def deliver(self, token: int) -> None:
        """Send a token to the client, and the end of the answer if it is the last one."""
        import torch

        self.streamer.put(torch.tensor([token]))
        self.tokens.append(token)
        if self.is_whole:
            self.streamer.end()

    @property
    def is_whole(self) -> bool:
        """Whether the client has its last token."""
        last = self.tokens[-1:]
        return any(map(self.streamer.is_end, last)) or len(self.tokens) >= self.config.max_new_tokens


def unsupported_reason(served: Served) -> str | None:
    """Why answers come one after the other."""
    if served.assistant is not None:
        return "an assistant drafts for one text at a time"
    if served.conversations is None:
        return "PyTorch's kernels, which --exact asks for, round rows of a batch differently"
    return continuous.unsupported_reason(served.base)


class Together(Worker):
    """Generates several answers at a time, those of one adapter together.

    Args:
        served: the model, for which :func:`unsupported_reason` is None.
        parallel: answers at a time.
        limits: as for :class:`Worker`.
    """

    def __init__(self, served: Served, parallel: int, **limits: Any) -> None:
        super().__init__(served, **limits)
        self._parallel = parallel
        self._batch: continuous.Batch | None = None
        self._queue: collections.deque[_Answer] = collections.deque()
        self._answers: list[_Answer] = []  # by row
        self._next: Any = None  # their last tokens, int64 [rows], on the device
        self._sent: tuple[list[_Answer], HostCopy] | None = None  # whose tokens the last step has chosen

    def _pieces(self) -> Iterator[None]:
        yield from warm_up.prompts(self._served, logits_processor=[_Logits()])
        self._batch = self._batch or self._new_batch()
        yield from warm_up.batches(self._served, self._waiting, self._batch, _WORDS)

    def _new_batch(self) -> continuous.Batch:
        return continuous.Batch(self._served.base, self._parallel, self._served.plan.context)

    def submit(self, prompt: Prompt, streamer: Streamer) -> None:
        """Have an answer generated in its turn; its place is given back then."""
        with self._lock:
            self._waiting.add(streamer)
            self._queue.append(_Answer(prompt, streamer, time.monotonic() + self.patience))
        self._thread.submit(self._serve)

    def _serve(self) -> None:
        """Answer until nobody waits."""
        import torch

        while (answer := self._waiting_for(None)) is not None:
            with torch.no_grad(), self._served.speaking(answer.prompt.adapter):
                self._answer_with(answer)

    def _waiting_for(self, beside: _Answer | None) -> _Answer | None:
        """The next request, unless it is for another adapter than the one ``beside`` it."""
        with self._lock:
            while self._queue:
                found = self._queue[0]
                wanted = found.streamer in self._waiting
                if wanted and beside is not None and found.prompt.adapter != beside.prompt.adapter:
                    return None
                self._queue.popleft()
                if wanted:
                    self._waiting.remove(found.streamer)
                    return found
        return None

    def _answer_with(self, first: _Answer) -> None:
        """Answer this request, and those that come meanwhile for the same adapter."""
        answer: _Answer | None = first
        while answer is not None or self._answers:
            while answer is not None:
                self._begin(answer)
                answer = self._waiting_for(first) if len(self._answers) < self._parallel else None
            if self._answers:
                failed = self._failure_of(f"{len(self._answers)} answers at a time", self._step)
                if failed is not None:
                    self._give_up(failed)
            if len(self._answers) < self._parallel:
                answer = self._waiting_for(first)

    def _begin(self, answer: _Answer) -> None:
        """Read a prompt, and have its answer take part in the next step."""
        if not self._begun(answer.streamer, answer.until):
            self._ended(answer.streamer, self.late())
            return
        what = f"this request, whose prompt has {answer.prompt.tokens} tokens"
        failed = self._failure_of(what, self._read, answer)
        if answer not in self._answers:
            self._ended(answer.streamer, failed)
        if failed is not None and self._batch is None:  # it failed while this one joined
            self._give_up(failed)

    def _read(self, answer: _Answer) -> None:
        import torch

        served, prompt = self._served, answer.prompt
        answer.prepare(served.base)
        config, logits = copy.copy(prompt.config), _Logits()
        requests.choose_likeliest(config)
        config.max_new_tokens, config.repetition_penalty = 1, None
        served.read(prompt.adapter, prompt.inputs, generation_config=config, logits_processor=[logits])
        assert served.conversations is not None
        answer.conversation = served.conversations.take()
        if answer.conversation is None:  # such as one with virtual tokens, whose cache nobody keeps
            torch.manual_seed(prompt.seed)
            served.read(prompt.adapter, prompt.inputs, generation_config=prompt.config, streamer=answer.streamer)
            return
        token = answer.token(logits.found)
        answer.note(token)
        answer.streamer.put(prompt.inputs["input_ids"].cpu())
        answer.deliver(int(token))
        if answer.is_whole:
            served.conversations.add(prompt.adapter, prompt.tokens, answer.conversation)
            return
        batch = self._batch or self._new_batch()
        self._batch = None  # unless the text can join
        batch.join(answer.conversation.layers, prompt.tokens)
        self._batch = batch
        answer.conversation.grow(answer.conversation.ids, {})  # its cache can go: the batch has the rows
        self._answers.append(answer)
        self._next = token if self._next is None else torch.cat([self._next, token])

    def _step(self) -> None:
        """Compute a token of each answer, and send those of the last step meanwhile."""
        assert self._batch is not None
        all_words = [answer.words for answer in self._answers]
        words = next((each for each in all_words if isinstance(each, str)), None) or max(*all_words, _WORDS)
        logits = self._batch.step(self._next, words)
        self._next = self._chosen(logits)
        before, self._sent = self._sent, ([*self._answers], HostCopy(self._next))
        if before is not None:
            self._deliver(*before)
        if not self._answers:  # nobody waits for what was chosen now
            self._sent = self._next = None

    def _chosen(self, logits: Any) -> Any:
        """The next token of each answer, int64 [rows]."""
        import torch

        likeliest = logits.float().argmax(dim=-1)
        tokens = [
            likeliest[row : row + 1] if answer.chooses_likeliest else answer.token(logits[row : row + 1])
            for row, answer in enumerate(self._answers)
        ]
        for answer, token in zip(self._answers, tokens):
            if not answer.chooses_likeliest:
                answer.note(token)
        return torch.cat(tokens)

    def _deliver(self, answers: list[_Answer], tokens: HostCopy) -> None:
        for answer, token in zip(answers, tokens.tolist()):
            if answer in self._answers:
                before = len(answer.tokens)
                failed = self._failure_of("this request", answer.deliver, token)
                if answer.is_whole or len(answer.tokens) == before:
                    self._end(answer, failed)

    def _end(self, answer: _Answer, failed: Refused | None) -> None:
        """End an answer, and keep its conversation."""
        import torch

        batch, conversations = self._batch, self._served.conversations
        row, conversation, prompt = self._answers.index(answer), answer.conversation, answer.prompt
        assert batch is not None
        assert conversations is not None
        assert conversation is not None
        text = torch.tensor([*prompt.inputs["input_ids"][0].tolist(), *answer.tokens[:-1]])
        conversation.grow(text, batch.rows_of(row, len(text)))  # as `generate`, which does not read the last token
        conversations.add(prompt.adapter, prompt.tokens, conversation)
        batch.leave(row)
        order = [*range(len(self._answers))]
        order[row] = order[-1]  # the last one gets its row
        self._answers = [self._answers[index] for index in order[:-1]]
        self._next = self._next[order[:-1]]
        self._ended(answer.streamer, failed)

    def _give_up(self, failed: Refused) -> None:
        """End all answers, whose batch is of no use any more."""
        answers, self._answers = self._answers, []
        self._batch = self._next = self._sent = None
        for answer in answers:
            self._ended(answer.streamer, failed)
