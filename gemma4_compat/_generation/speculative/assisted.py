"""``generate`` with an assistant model or prompt lookup, after ``decode_fast(assistants=True)``.

The prompt is read as without an assistant. Then the text grows by :mod:`speculative_steps`: some drafts, which the
model reads together with the newest token. :mod:`draft_length` says how many; none if they do not pay.

Where no user's code runs between two tokens, a step is read late: the next one is launched before, from the state that
the device has. What was launched when the text turns out to have ended is dropped.

A number of drafts is tried before its first use: as many tokens are decoded one by one, and then read at once. If a
bit of the model's states, keys or values differs, there are no drafts: the text would not be that of single tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation import call, expert_slots
from gemma4_compat._generation.sampling.sampling_noise import Noise
from gemma4_compat._generation.sampling.stopping import Stop
from gemma4_compat._generation.speculative import draft_length, speculative_steps
from gemma4_compat._generation.speculative.draft_windows import Windows
from gemma4_compat._generation.speculative.lookup import Lookup
from gemma4_compat._generation.speculative.speculative_steps import DraftStep, VerifyStep
from gemma4_compat._graphs import decoder, deferred_stop, static_caches


class Text:
    """A text that is decoded in speculative steps.

    Args:
        model: of transformers.
        ids: (1, length), the prompt.
        config: the ``GenerationConfig`` of the call.
        given: the other arguments of ``GenerationMixin._assisted_decoding``.
    """

    def __init__(self, model: Any, ids: Any, config: Any, given: dict[str, Any]) -> None:
        self._model, self._config = model, config
        self._ids = ids  # the text, without what was added since
        self._added: list[Any] = []
        self._decoding = decoder.of(model)
        self._assistant, self._streamer = given.get("assistant_model"), given.get("streamer")
        processors = tuple(given["logits_processor"])
        self._drafting = speculative_steps.Choice.of(processors, samples=bool(config.do_sample))
        self._choice = speculative_steps.Choice(bool(config.do_sample), (), processors)
        #: Whether a graph may choose tokens.
        self._in_graph = self._drafting.processors == processors
        self._no_user_code = deferred_stop.no_user_code(model)
        self._noise = Noise(ids.device) if config.do_sample else None
        self._stop = Stop(given["stopping_criteria"], config.max_length)
        most, self._lookup = speculative_steps.MAX_TOKENS - 1, None
        if getattr(config, "prompt_lookup_num_tokens", None) is not None:
            most = min(most, int(config.prompt_lookup_num_tokens))
            self._lookup = Lookup(int(getattr(config, "max_matching_ngram_size", None) or 2))
            self._lookup.extend(ids[0].tolist())
        drafter = model if self._lookup is not None else self._assistant
        self._known = self._decoding.draft_lengths.setdefault(drafter, draft_length.Known())
        self._draft_length = draft_length.DraftLength(most, self._known)
        self._counted = [decoder.of(one).statistics for one in dict.fromkeys((model, drafter))]
        self._last: dict[Any, tuple[Any, Any]] = {}  # steps and their graphs, by what they are replayed for
        self._launched: list[speculative_steps.Launched] = []  # speculative steps that were not read, in order
        self._checked: set[int] = set()  # ids of models that were looked at in full
        self._steps, self._read_at = 0, 0.0
        self._done = False

    def decode(self, model_kwargs: dict[str, Any]) -> Any:
        """Read the prompt and decode the text.

        Args:
            model_kwargs: as ``GenerationMixin._prefill`` gets them, with a static cache that holds nothing.

        Returns:
            the prompt and the new tokens, (1, length).
        """
        self._cache = cache_names.cache_in(model_kwargs)
        logits = self._model._prefill(self._ids, self._config, model_kwargs).logits
        scores = logits[:, -1].float().clone()
        given = call.decoder_for(self._model, self._cache)
        assert given is not None  # :func:`unsupported_reason` has seen to it
        self._given, self._held = given, self._ids.shape[1] - 1
        try:
            noise = None if self._noise is None else self._noise.rows(scores.shape[-1], 1)
            newest = self._choice.token(self._ids, scores, noise)[None]
            self._add(newest, newest[0].tolist())
            if not self._done:
                self._begin(newest, scores.shape[-1])
                with self._model._optimize_model_for_decode():
                    while not self._done:
                        self._step()
        finally:
            expert_slots.give_back(self._model)
            if self._noise is not None:
                self._noise.finish()
        if self._streamer is not None:
            self._streamer.end()
        return self._text()

    def _begin(self, newest: Any, vocabulary: int) -> None:
        """After the prompt: take the windows, and note what the first speculative step starts from."""
        import torch

        self._vocabulary = vocabulary
        memory = self._decoding.keep_memory(self._cache)
        if memory.windows is None:
            memory.windows = Windows(self._cache, int(self._model.config.get_text_config().sliding_window))
        self._windows: Windows = memory.windows
        self._windows.take(self._cache, self._held)
        self._limit = min(static_caches.length(self._cache), self._stop.length - 1)
        self._state = {"newest": newest, "held": torch.full((), self._held, device=newest.device)}
        self._nothing = newest[:, :0]

    # Speculative steps

    def _step(self) -> None:
        """A speculative step with as many drafts as :mod:`draft_length` says, or the first try of so many."""
        wanted = self._wanted()
        if self._done:
            return
        begun, before = time.perf_counter(), self._unusual()
        drafts = self._drafted(wanted) if wanted else self._nothing
        if drafts.shape[1] and not self._tried.get(self._key(drafts.shape[1])):
            self._settle()
            if not self._done:
                self._try(drafts.shape[1])
            return
        self._launch(drafts, begun, before)
        self._settle(leave=int(self._is_late()))

    def _wanted(self) -> int:
        """How many drafts the next speculative step has. What was launched is read if that depends on it."""
        replayable = self._decoding.state is not None  # not, for one, under autocast
        wanted = self._draft_length.next() if replayable and "hidden" in self._state else 0
        if (wanted and self._lookup is not None) or not self._fits(wanted):
            self._settle()
        return wanted if self._fits(wanted) and self._is_ready(wanted) else 0

    def _fits(self, drafts: int) -> bool:
        """Whether a step with so many drafts has room, and belongs to the text, however many before were right."""
        _, most = self._bounds()
        within = not self._launched or self._windows.has_room(most + drafts + 1)
        return within and most + drafts + 1 <= self._limit

    def _graphs(self, drafts: int) -> list[Any]:
        """Those that speculative steps with so many drafts have replayed in this text."""
        return [graph for key, (_, graph) in self._last.items() if drafts == (key if isinstance(key, int) else key[0])]

    def _are_fused(self, drafts: int) -> bool:
        return all(graph.progress.is_over for graph in self._graphs(drafts))

    def _is_ready(self, drafts: int) -> bool:
        """Whether a speculative step with so many drafts may be next.

        Only graphs that are all fused, or all not, can be compared. Those that are behind are fused as soon as their
        kernels are compiled; until then, speculative steps have the graphs of the other kind.
        """
        kinds = self._graphs(0), self._graphs(drafts)
        plain, drafting = self._are_fused(0), self._are_fused(drafts)
        if not all(kinds) or plain == drafting:
            return True
        behind = kinds[int(plain)]
        for graph in behind:
            graph.progress.hasten()
        compiles = any(graph.progress.awaits for graph in behind)
        return compiles != plain

    def _bounds(self) -> tuple[int, int]:
        """How many tokens are held after what was launched: at least and at most."""
        tokens = [one.drafts + 1 for one in self._launched]
        return self._held + len(tokens), self._held + sum(tokens)

    def _is_late(self) -> bool:
        """Whether a speculative step is read after the next one was launched, as in :mod:`deferred_stop`."""
        waiting = self._steps * deferred_stop.WAITING
        return self._no_user_code and self._in_graph and self._known.seconds.get(0, float("inf")) <= waiting

    def _unusual(self) -> list[float]:
        """What changes with a capture, a step without a graph, and a look at all of a model, which take long."""
        found: list[float] = [len(self._checked)]
        for one in self._counted:
            found += (one.eager, one.capture_seconds)
        return found

    def _key(self, count: int) -> tuple[Any, ...]:
        """What the first try of so many drafts is known by."""
        return count, self._windows.addresses

    @property
    def _tried(self) -> dict[Any, bool]:
        """Numbers of drafts, and whether they have the bits of single tokens."""
        assert self._decoding.state is not None
        found: dict[Any, bool] = self._decoding.state.notes.setdefault(Text, {})
        return found

    def _try(self, count: int) -> None:
        """Decode tokens one by one, then read them at once: are the bits the same?

        Where they differ, those of single tokens stay, and there are no drafts from now on.
        """
        import torch

        key, tried = self._key(count), self._tried
        if key in tried:  # and refused
            self._draft_length = draft_length.DraftLength(0)
            return
        self._windows.make_room(self._held, count + 1)
        state, held, states = self._state, self._held, []
        noise = self._noise_for(count + 1)
        for _ in range(count + 1):
            self._launch(self._nothing, time.perf_counter(), self._unusual())
            self._settle()
            states.append(self._states)
            if self._done:
                return
        changed = self._windows.changes(self._cache, held, count + 1)
        copies = [view.clone() for view in changed]
        found = self._verified(self._text()[:, -count - 1 : -1], state, (held, held), noise)
        same = all(map(same_bits, changed, copies)) and same_bits(found["states"], torch.cat(states, dim=1))
        tried[key] = same
        if not same:
            for view, copy in zip(changed, copies):
                view.copy_(copy)
            found_out = f"{count + 1} tokens at once differ bitwise from one by one"
            self._decoding.reason(found_out, "decoding without drafts")
            self._draft_length = draft_length.DraftLength(0)

    def _launch(self, drafts: Any, begun: float, before: list[float]) -> None:
        """A speculative step with these drafts, (1, n), from where the text ends on the device.

        Args:
            drafts: of the speculative step.
            begun: when it began, in seconds.
            before: :meth:`_unusual` then.
        """
        tokens = drafts.shape[1] + 1
        if not self._launched:
            self._windows.make_room(self._held, tokens)
        noise = self._noise_for(tokens)
        found = self._verified(drafts, self._state, self._bounds(), noise)
        if not self._in_graph:
            found = speculative_steps.accept(self._choice, self._text(), found, drafts, noise)
        self._state = {name: found[name] for name in ("newest", "hidden", "held")}
        self._states = found["states"]
        fused = self._are_fused(tokens - 1)
        self._known.note_fused(tokens - 1, fused=fused)
        says = before if fused or not self._are_fused(0) else None
        self._launched.append(speculative_steps.Launched(tokens - 1, found["verdict"], found["grown"], begun, says))

    def _settle(self, *, leave: int = 0) -> None:
        """Read what was launched, except the newest ``leave`` speculative steps; nothing after the end of the text."""
        while len(self._launched) > leave and not self._done:
            self._read(self._launched.pop(0))
        if self._done:
            self._launched.clear()

    def _read(self, one: speculative_steps.Launched) -> None:
        *chosen, right = one.read()  # the host waits
        now = time.perf_counter()
        seconds = now - max(one.begun, self._read_at)
        self._steps, self._read_at = self._steps + 1, now
        counted = self._decoding.statistics
        counted.rounds, counted.drafted = counted.rounds + 1, counted.drafted + one.drafts
        counted.accepted += right
        self._draft_length.note(one.drafts, right, seconds if one.before == self._unusual() else None)
        self._add(one.verdict, chosen[: right + 1])

    def _verified(self, drafts: Any, state: dict[str, Any], held: tuple[int, int], noise: Any) -> dict[str, Any]:
        """What the model returns for the newest token of a state, and drafts after it."""
        inputs = {"newest": state["newest"], "held": state["held"], "drafts": drafts, "noise": None, "choice": None}
        if self._in_graph:
            inputs |= {"noise": noise, "choice": self._drafting}
        last = self._last.get(drafts.shape[1])
        if last is not None:
            last[0].held = held
        kept = self._given.experts(speculative_steps.MAX_TOKENS)
        return self._run(
            *(drafts.shape[1], inputs),
            lambda: VerifyStep(self._model, inputs, self._cache, self._windows, held, kept),
        )

    def _drafted(self, count: int) -> Any:
        """Drafts, (1, ``count``); or none, (1, 0)."""
        import torch

        if self._lookup is not None:
            found = self._lookup.drafts(count)
            padded = found + [0] * (count - len(found))
            return torch.tensor([padded], device=self._ids.device) if found else self._nothing
        embedding = self._model.get_input_embeddings().weight
        assert self._decoding.state is not None
        version = id(self._decoding.state.guards), embedding.data_ptr()
        inputs = {**self._state, "noise": self._noise_for(count), "choice": self._drafting, "drafts": count}
        drafting = decoder.of(self._assistant)
        drafting.custom = True
        self._decoding.known_assistants.add(self._assistant)
        drafted = self._run(
            *((count, version), inputs),
            lambda: DraftStep(self._assistant, inputs, self._cache, self._windows, self._model, version),
        )
        return drafted["drafts"]

    def _run(self, key: Any, inputs: dict[str, Any], make: Callable[[], Any]) -> dict[str, Any]:
        """Replay a step that :meth:`_run_anew` has replayed before, or make it."""
        last = self._last.get(key)

        def run() -> Any:
            found = None
            if last is not None and self._no_user_code:
                step, graph = last
                step.renew(inputs)
                found = step.decoding.steps.again(step, graph, no_user_code=True)
            return self._run_anew(key, make()) if found is None else found

        found: dict[str, Any] = self._given.exclusively(run)
        return found

    def _run_anew(self, key: Any, step: Any) -> Any:
        """Replay a step, or run it."""
        decoding, first, found = step.decoding, id(step.model) not in self._checked, None
        self._checked.add(id(step.model))
        self._last.pop(key, None)
        if step.unsupported_reason is None:
            found = decoding.run(step, first=first)
        else:
            decoding.reason(step.unsupported_reason)
        if found is None:
            decoding.statistics.eager += 1
            with step.numerics():
                return step.forward(step.inputs)
        graph = decoding.steps.graph_of(step)
        if graph is not None:
            self._last[key] = step, graph
        return found

    def _noise_for(self, tokens: int) -> Any:
        """What the next tokens are drawn with, (tokens, vocabulary); None if the likeliest are taken."""
        if self._noise is None:
            return None
        if not self._launched:
            return self._noise.rows(self._vocabulary, tokens)
        (one,) = self._launched
        return self._noise.rows_after(one.drafts + 1, one.grown, self._vocabulary, tokens)

    # The text

    def _text(self) -> Any:
        """The tokens that were read, (1, length)."""
        import torch

        if self._added:
            self._ids, self._added = torch.cat((self._ids, *self._added), dim=1), []
        return self._ids

    def _add(self, chosen: Any, tokens: list[int]) -> None:
        """Add tokens, which ``chosen``, (1, length), begins with, to the text, until it ends."""
        import torch

        before, self._held = self._held + 1, self._held + len(tokens)
        count, self._done = self._stop.end(before, tokens)
        if self._stop.asked:
            ids = torch.cat((self._text(), chosen[:, :count]), dim=1)
            for length in range(before + 1, before + count + 1):
                if self._stop.asks(ids[:, :length]):
                    count, self._done = length - before, True
                    break
        self._added.append(chosen[:, :count])
        if self._noise is not None:
            self._noise.use(count)
        if self._lookup is not None:
            self._lookup.extend(tokens[:count])
        if self._streamer is not None:
            for token in tokens[:count]:
                self._streamer.put(torch.tensor([token]))
