"""The call that ``generate`` makes for its prompt and for each step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.models import family
from gemma4_compat._generation import expert_slots
from gemma4_compat._generation.prompts import buckets, embedded, prompts
from gemma4_compat._generation.sampling import best_words
from gemma4_compat._graphs import decoder, static_caches, step_inputs, steps, unsupported
from gemma4_compat._graphs.captured_calls import State
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat._offload import model_lock


class Decoder:
    """Stands in for ``model.__call__`` during one ``generate``.

    Args:
        model: a transformers model.
        decoding: from :func:`decoder.of`.
        cache: of this ``generate``.
    """

    def __init__(self, model: Any, decoding: decoder.Decoding, cache: Any) -> None:
        self.model, self._decoding, self._cache = model, decoding, weakref.ref(cache)
        self.following: step_inputs.Following | None = None
        self._first, self._given_up, self._asked, self._looked = True, False, False, False
        self._head: best_words.Head | None = None
        self._experts: expert_slots.Kept | None = None

    def is_for(self, cache: Any) -> bool:
        """Whether this one serves a ``generate`` with that cache, and has not begun."""
        return self._first and self._cache() is cache

    @property
    def state(self) -> State | None:
        """That of the model in the last step or prompt."""
        return self._decoding.state

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Return what ``model(*args, **inputs)`` returns; where it can be replayed, without running its Python."""
        last = None if self.following is None else self.following.last
        outputs = self._forward(*args, **inputs)
        if self.following is not None and self.following.last is last:
            self.following.interrupt()
        return outputs

    def _forward(self, *args: Any, **inputs: Any) -> Any:
        step = None if args else steps.Step.of(self._decoding, self.model, inputs, self._copies)
        if step is None:
            return self.model(*args, **inputs) if args or not self._decoding.preferred else self._read(inputs)
        if not self._given_up:
            outputs = self._run(step)
            if outputs is not None:
                return outputs
            self._given_up = True
        self._decoding.statistics.eager += 1
        with self._decoding.arithmetic(self.model.device):
            return self.model(**inputs)

    def _copies(self, rows: int) -> tuple[best_words.Head | None, expert_slots.Kept | None]:
        """The head in two stages and experts on the card, for all steps of this ``generate``; found in the first."""
        if not self._asked:
            self._asked = True
            self._head = self.exclusively(lambda: best_words.of(self._decoding, self.model, rows))
        return self._head, self.experts(rows)

    def experts(self, rows: int) -> expert_slots.Kept | None:
        """The experts on the card without the head, for steps that read so many tokens."""
        if not self._looked:
            self._looked = True
            self._experts = self.exclusively(lambda: expert_slots.of(self._decoding, self.model, rows))
        elif self._experts is not None:
            self._experts = self.exclusively(self._same_experts)
        return self._experts

    def _same_experts(self) -> expert_slots.Kept | None:
        """Those of this ``generate``, unless another text has had others made, or needs the memory."""
        if self._experts is None or self._experts is not self._decoding.experts:
            return None
        return self._experts if self._experts.is_there else expert_slots.taken(self._decoding, self.model.device)

    def _run(self, step: steps.Step) -> Any:
        if step.unsupported_reason is not None:
            self._decoding.reason(step.unsupported_reason)
            return None
        first, self._first = self._first, False
        step.following = self.following
        return self.exclusively(functools.partial(self._decoding.run, step, first=first))

    def follow(self, ids: Any) -> Any:
        """Return what the model returns for the token that ends ``ids``, [batch, length], if ``following.ready``."""
        assert self.following is not None
        outputs = self.exclusively(functools.partial(self._follow, self.following, ids))
        return self(**self.following.stop()) if outputs is None else outputs

    def _follow(self, following: step_inputs.Following, ids: Any) -> Any:
        """Replay the step after the last one; None if that graph does not serve it."""
        following.advance(ids)
        assert following.last is not None
        graph = self._decoding.steps.again(*following.last, prepared=True)
        return None if graph is None else following.outputs()

    def _read(self, inputs: dict[str, Any]) -> Any:
        """Read a prompt, or whatever has several tokens."""
        prompt = prompts.Prompt.of(self._decoding, self.model, inputs)
        merged = prompt is None and embedded.may_be(inputs)
        return self._replayed(prompt, functools.partial(self._read_without_a_graph, inputs, merged=merged))

    def _read_embedded(self, below: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Run the forward ``below`` of the text model with these inputs, as a replay if possible."""
        prompt = embedded.Embedded.made_of(self._decoding, self.model, below, inputs)

        def eagerly() -> Any:
            with self._decoding.lock.held():
                prompts.make_room(self._decoding, self.model, inputs)
            return below(**inputs)

        return self._replayed(prompt, eagerly)

    def _replayed(self, prompt: prompts.Prompt | None, eagerly: Callable[[], Any]) -> Any:
        """Replay a prompt if possible; otherwise, and without one, call ``eagerly``."""
        if prompt is None or prompt.unsupported_reason is not None:
            return eagerly()
        outputs = self.exclusively(functools.partial(prompts.run, prompt, first=self._first))
        if outputs is not None:
            self._first = False
            return outputs
        outputs = eagerly()
        self.exclusively(functools.partial(prompts.has_run, prompt))
        return outputs

    def _read_without_a_graph(self, inputs: dict[str, Any], *, merged: bool) -> Any:
        """Where memory runs out, the graphs of other prompts go, and a prompt in an empty cache is read again.

        ``merged``: what its text model does may be replayed.
        """
        import torch

        cache = cache_names.cache_in(inputs)
        if not merged:  # or it is asked for later, without a replay
            with self._decoding.lock.held():
                prompts.make_room(self._decoding, self.model, inputs)
        again = static_caches.is_static(cache) and static_caches.held(cache) == 0
        try:
            return self._embedded_reads(inputs) if merged else self._model_reads(inputs)
        except torch.OutOfMemoryError:
            with self._decoding.lock.held():
                released = self._decoding.prompts.release()
                released |= self._decoding.give_back_experts()
                if not (self._decoding.give_back_head() or released) or not again:
                    raise
        static_caches.empty(cache)  # not in the handler: the error holds what the forward had
        return self._model_reads(inputs)

    def _model_reads(self, inputs: dict[str, Any]) -> Any:
        with self._decoding.reading(self.model.device, cache_names.cache_in(inputs)):
            return self.model(**inputs)

    def _embedded_reads(self, inputs: dict[str, Any]) -> Any:
        with embedded.read_by(self._read_embedded, self.model):
            return self._model_reads(inputs)

    def read_bucket(self, inputs: dict[str, Any], real: int, *, first: bool) -> bool:
        """Read a bucket of a prompt. False, and nothing has run, if the ``first`` one shows that it cannot be done.

        Args:
            inputs: of a :class:`buckets.Bucket`.
            real: how many tokens are no padding.
            first: whether it is the first one of its prompt.
        """
        decoding, model = self._decoding, self.model
        bucket = buckets.Bucket(decoding, model, inputs, cache_names.cache_in(inputs), real)
        if bucket.unsupported_reason is not None or (first and decoding.prompts.refuses(bucket)):
            return False
        if self.exclusively(functools.partial(prompts.run, bucket, first=self._first)) is not None:
            self._first = False
            return True
        if first and next(unsupported.prompt_reasons(model), None) is not None:
            return False
        with decoding.lock.held():
            prompts.make_room(decoding, model, inputs)
        with bucket.numerics():
            bucket.forward(bucket.inputs)
        self.exclusively(functools.partial(prompts.has_run, bucket))
        return True

    def largest_bucket(self, rows: int, cache: Any) -> int:
        """Tokens of the largest bucket of a prompt of so many rows: as much as there was room for, the first time that
        a cache was as long as this one.
        """
        known, key = self._decoding.largest_buckets, (rows, static_caches.length(cache))
        if key not in known:
            *several, small = [size for size in buckets.sizes(rows) if size >= buckets.SMALL]
            where = self._decoding, self.model, self.model.device
            known[key] = next((size for size in several if prompts.has_room(*where, rows, size, cache)), small)
        return known[key]

    def exclusively(self, function: Callable[[], Any]) -> Any:
        """Call ``function`` while other threads run no step of this model."""
        lock = model_lock.of(self.model)
        if lock is None:
            return self._decoding.lock.run(function)
        return lock.run(self._decoding.lock.run, function)


def may_replay(model: Any, cache: Any) -> bool:
    """Whether steps with this cache, or None, may be replayed."""
    if not family.is_gemma4_config(model.config) or cache is None or not static_caches.is_static(cache):
        return False
    return model.device.type in RECORDERS


def decoder_for(model: Any, cache: Any) -> Decoder | None:
    """A decoder for a ``generate`` with this cache; None if its steps would run without a graph anyway.

    Args:
        model: a transformers model.
        cache: what ``generate`` passes to the model.
    """
    if not may_replay(model, cache):
        return None
    decoding = decoder.of(model)
    known: Decoder | None = None if decoding.waiting is None else decoding.waiting()
    if known is not None and known.model is model and known.is_for(cache):
        return known  # of the same `generate`, which asks again for its prompt
    decoding.tidy(cache)
    found = Decoder(model, decoding, cache)
    decoding.waiting = weakref.ref(found)
    return found
