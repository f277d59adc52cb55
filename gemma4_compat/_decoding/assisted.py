"""``generate`` with an assistant model or prompt lookup, after ``decode_fast(assistants=True)``.

The prompt is read as without an assistant. Then the text grows by rounds (:mod:`rounds`): some drafts, which the model
reads together with the newest token. :mod:`pace` says how many; none if they do not pay.

A number of drafts is tried before its first use: as many tokens are decoded one by one, and then read at once. If a
bit of the model's states, keys or values differs, there are no drafts: the text would not be that of single tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gemma4_compat._decoding import call, choosing, decoder, deferral, obstacles, pace, rounds, static_caches
from gemma4_compat._decoding.bits import same_bits
from gemma4_compat._decoding.draft_windows import Windows
from gemma4_compat._decoding.lookup import Lookup
from gemma4_compat._models import cache_names

#: Beginnings of the names of classes that draft from keys and values of the model.
_ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
#: What transformers sets ``cache_implementation`` to with an assistant, before 5.24.
_OF_ASSISTANTS = "dynamic_full"


def obstacle(model: Any, ids: Any, config: Any, given: dict[str, Any]) -> str | None:
    """Why a text cannot be decoded in rounds; None if nothing is known to be in the way.

    Args:
        model: of transformers, after ``decode_fast``.
        ids: (batch, length), the prompt.
        config: the ``GenerationConfig`` of the call.
        given: the other arguments of ``GenerationMixin._assisted_decoding``.
    """
    from gemma4_compat._decoding import own

    assistant, cache = given.get("assistant_model"), cache_names.cache_in(given)
    looks_up = getattr(config, "prompt_lookup_num_tokens", None) is not None
    text = model.config.get_text_config()
    reasons = {
        "the assistant is no Gemma 4 assistant": not (looks_up or type(assistant).__name__.startswith(_ASSISTANTS)),
        "the cache is the caller's": cache is None or bool(getattr(cache, "_is_user_defined", False)),
        "cache_implementation is set": config.cache_implementation not in (None, "static", _OF_ASSISTANTS),
        "more is returned than tokens": bool(config.return_dict_in_generate),
        "a logits processor is not transformers' own": not all(map(deferral.is_pure, given["logits_processor"])),
        "assistant_ensemble_weight is set": getattr(config, "assistant_ensemble_weight", None) is not None,
        "several processes generate together": bool(given.get("synced_gpus")),
        "attention is not sdpa": text._attn_implementation != "sdpa",
        # A try would not find that out: it depends on which experts the tokens of a round share.
        "experts give a token other bits beside others": bool(getattr(text, "enable_moe_block", False)),
        "the prompt is padded, or not of tokens": not _is_plain(ids, given),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is None and not looks_up:
        found = _of_assistant(model, assistant)
    return found or obstacles.of_virtual_tokens(model) or own.obstacle(model.device)


def _is_plain(ids: Any, given: dict[str, Any]) -> bool:
    """Whether each token's position is its place in the text."""
    import torch

    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if len(ids) != 1 or not ids.numel() or given.get("inputs_embeds") is not None:
        return False
    if mask is not None and not bool(mask.all()):
        return False
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    return positions is None or (positions.shape == places.shape and bool((positions == places).all()))


def _of_assistant(model: Any, assistant: Any) -> str | None:
    if not hasattr(assistant, "create_attention_masks"):
        return "the assistants of this release of transformers make their masks in another way"
    here, there = ((one.device, one.dtype) for one in (model, assistant))
    return None if here == there else f"the assistant is {there[1]} on {there[0]}, the model {here[1]} on {here[0]}"


class Text:
    """A text that is decoded in rounds.

    Args:
        model: of transformers.
        ids: (1, length), the prompt.
        config: the ``GenerationConfig`` of the call.
        given: the other arguments of ``GenerationMixin._assisted_decoding``.
    """

    def __init__(self, model: Any, ids: Any, config: Any, given: dict[str, Any]) -> None:
        self._model, self._config, self._ids = model, config, ids
        self._decoding = decoder.of(model)
        self._assistant, self._streamer = given.get("assistant_model"), given.get("streamer")
        processors = tuple(given["logits_processor"])
        self._drafting = rounds.Choice.of(processors, samples=bool(config.do_sample))
        self._choice = rounds.Choice(bool(config.do_sample), (), processors)
        #: Whether a graph may choose tokens.
        self._in_graph = self._drafting.processors == processors
        self._noise = _Noise(ids.device) if config.do_sample else None
        self._stop = _Stop(given["stopping_criteria"], config.max_length)
        most, self._lookup = rounds.MAX_TOKENS - 1, None
        if getattr(config, "prompt_lookup_num_tokens", None) is not None:
            most = min(most, int(config.prompt_lookup_num_tokens))
            self._lookup = Lookup(int(getattr(config, "max_matching_ngram_size", None) or 2))
            self._lookup.extend(ids[0].tolist())
        self._pace = pace.Pace(most)
        self._checked: set[int] = set()  # ids of models that were looked at in full
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
        assert given is not None  # :func:`obstacle` has seen to it
        self._given = given
        try:
            newest = self._choice.token(self._ids, scores, self._noise_for(scores.shape[-1], 1))[None]
            self._add(newest, newest[0].tolist())
            if not self._done:
                self._begin(newest, scores.shape[-1])
                with self._model._optimize_model_for_decode():
                    while not self._done:
                        self._round()
        finally:
            if self._noise is not None:
                self._noise.finish()
        if self._streamer is not None:
            self._streamer.end()
        return self._ids

    def _begin(self, newest: Any, vocabulary: int) -> None:
        """After the prompt: take the windows, and note what the first round starts from."""
        import torch

        self._vocabulary, self._held = vocabulary, self._ids.shape[1] - 1
        memory = self._decoding.keep_memory(self._cache)
        if memory.windows is None:
            memory.windows = Windows(self._cache, int(self._model.config.get_text_config().sliding_window))
        self._windows: Windows = memory.windows
        self._windows.take(self._cache, self._held)
        self._state = {"newest": newest, "held": torch.full((), self._held, device=newest.device)}
        self._nothing = newest[:, :0]

    # Rounds

    def _round(self) -> None:
        """A round with as many drafts as :mod:`pace` says, or the first try of so many."""
        replayable = bool(self._decoding.variants)  # not, for one, under autocast
        wanted = self._pace.next() if replayable and "hidden" in self._state else 0
        if wanted > min(static_caches.length(self._cache), self._stop.length - 1) - self._held - 1:
            wanted = 0
        begun, captured = time.perf_counter(), self._captured()
        drafts = self._drafted(wanted) if wanted else self._nothing
        if drafts.shape[1] and not self._decoding.variants[0].tried.get(self._key(drafts.shape[1])):
            self._try(drafts.shape[1])
            return
        right = self._read(drafts)
        seconds = time.perf_counter() - begun
        self._pace.note(drafts.shape[1], right, seconds if captured == self._captured() else None)

    def _captured(self) -> tuple[float, ...]:
        """What changes with a capture, and with the first step of a kind, which is slow as well."""
        models = [self._model] if self._lookup is not None else [self._model, self._assistant]
        known = [decoder.of(model) for model in models]
        kinds = sum(len(variant.seen) for one in known for variant in one.variants)
        return (kinds, *(one.statistics.capture_seconds for one in known))

    def _key(self, count: int) -> tuple[Any, ...]:
        """What the first try of so many drafts is known by."""
        return count, self._windows.addresses

    def _try(self, count: int) -> None:
        """Decode tokens one by one, then read them at once: are the bits the same?

        Where they differ, those of single tokens stay, and there are no drafts from now on.
        """
        import torch

        key, tried = self._key(count), self._decoding.variants[0].tried
        if key in tried:  # and refused
            self._pace = pace.Pace(0)
            return
        self._windows.make_room(self._held, count + 1)
        state, held, states = self._state, self._held, []
        noise = self._noise_for(self._vocabulary, count + 1)
        for _ in range(count + 1):
            self._read(self._nothing)
            states.append(self._states)
            if self._done:
                return
        changed = self._windows.changes(self._cache, held, count + 1)
        copies = [view.clone() for view in changed]
        found = self._verified(self._ids[:, -count - 1 : -1], state, held, noise)
        same = all(map(same_bits, changed, copies)) and same_bits(found["states"], torch.cat(states, dim=1))
        tried[key] = same
        if not same:
            for view, copy in zip(changed, copies):
                view.copy_(copy)
            found_out = f"{count + 1} tokens at once have other bits than one by one"
            self._decoding.reason(found_out, "decoding without drafts")
            self._pace = pace.Pace(0)

    def _read(self, drafts: Any) -> int:
        """A round with these drafts, (1, n), from where the text ends: how many of them were right."""
        tokens = drafts.shape[1] + 1
        self._windows.make_room(self._held, tokens)
        noise = self._noise_for(self._vocabulary, tokens)
        found = self._verified(drafts, self._state, self._held, noise)
        if not self._in_graph:
            found = rounds.accepted(self._choice, self._ids, found, drafts, noise)
        *chosen, right = found["told"][0].tolist()  # the host waits
        held = self._state["held"] + found["grown"]
        self._state = {"newest": found["newest"], "hidden": found["hidden"], "held": held}
        self._states, self._held = found["states"], self._held + right + 1
        counted = self._decoding.statistics
        counted.rounds, counted.drafted = counted.rounds + 1, counted.drafted + tokens - 1
        counted.accepted += right
        self._add(found["told"], chosen[: right + 1])
        return int(right)

    def _verified(self, drafts: Any, state: dict[str, Any], held: int, noise: Any) -> dict[str, Any]:
        """What the model returns for the newest token of a state, and drafts after it."""
        inputs = {"newest": state["newest"], "held": state["held"], "drafts": drafts, "noise": None, "choice": None}
        if self._in_graph:
            inputs |= {"noise": noise, "choice": self._drafting}
        return self._run(self._model, rounds.Verification(inputs, self._cache, self._windows, held))

    def _drafted(self, count: int) -> Any:
        """Drafts, (1, ``count``); or none, (1, 0)."""
        import torch

        if self._lookup is not None:
            found = self._lookup.drafts(count)
            padded = found + [0] * (count - len(found))
            return torch.tensor([padded], device=self._ids.device) if found else self._nothing
        embedding = self._model.get_input_embeddings().weight
        version = id(self._decoding.variants[0].dependencies), embedding.data_ptr()
        noise = self._noise_for(self._vocabulary, count)
        inputs = {**self._state, "noise": noise, "choice": self._drafting, "drafts": count}
        drafting = decoder.of(self._assistant)
        drafting.own = True
        self._decoding.known_assistants.add(self._assistant)
        step = rounds.Draft(inputs, self._cache, self._windows, self._model, version)
        return self._run(self._assistant, step)["drafts"]

    def _run(self, model: Any, step: Any) -> dict[str, Any]:
        """Replay a step, or run it."""
        decoding, first = decoder.of(model), id(model) not in self._checked
        self._checked.add(id(model))

        def run() -> Any:
            found = None
            if step.obstacle is None:
                found = decoding.run(model, step, first=first)
            else:
                decoding.reason(step.obstacle)
            if found is None:
                decoding.statistics.eager += 1
                with decoding.arithmetic(step.device, step.tokens):
                    found = step.forward(model, step.inputs)
            return found

        found: dict[str, Any] = self._given.alone(run)
        return found

    # The text

    def _noise_for(self, vocabulary: int, tokens: int) -> Any:
        """What the next tokens are drawn with; None if the likeliest are taken."""
        return None if self._noise is None else self._noise.rows(vocabulary, tokens)

    def _add(self, chosen: Any, tokens: list[int]) -> None:
        """Add tokens, which ``chosen``, (1, length), begins with, to the text, until it ends."""
        import torch

        before = self._ids.shape[1]
        count, self._done = self._stop.end(before, tokens)
        ids = torch.cat((self._ids, chosen[:, :count]), dim=1)
        for length in range(before + 1, before + count + 1):
            if self._stop.asks(ids[:, :length]):
                count, self._done = length - before, True
                break
        self._ids = ids[:, : before + count]
        if self._noise is not None:
            self._noise.use(count)
        if self._lookup is not None:
            self._lookup.extend(tokens[:count])
        if self._streamer is not None:
            for token in tokens[:count]:
                self._streamer.put(torch.tensor([token]))


class _Stop:
    """When a text ends.

    Args:
        criteria: a ``StoppingCriteriaList``.
        length: tokens of the text at most, if no criterion says so.
    """

    def __init__(self, criteria: Sequence[Any], length: int) -> None:
        self.length = min([int(one.max_length) for one in criteria if _is_limit(one)] or [int(length)])
        ends = [one.eos_token_id for one in criteria if _is_end(one)]
        self._ends = {int(token) for tensor in ends for token in tensor.flatten().tolist()}
        self._others = [one for one in criteria if not _is_limit(one) and not _is_end(one)]

    def end(self, before: int, tokens: list[int]) -> tuple[int, bool]:
        """How many of these tokens, after ``before`` others, belong to the text, and whether it ends there."""
        for place, token in enumerate(tokens, start=1):
            if token in self._ends or before + place >= self.length:
                return place, True
        return len(tokens), False

    def asks(self, ids: Any) -> bool:
        """Whether one of the other criteria ends the text after these tokens, (1, length)."""
        return any(bool(one(ids, None).all()) for one in self._others)


def _is_limit(criterion: Any) -> bool:
    return choosing.is_class(criterion, "MaxLengthCriteria")


def _is_end(criterion: Any) -> bool:
    return choosing.is_class(criterion, "EosTokenCriteria")


class _Noise:
    """Exponentially distributed numbers, a row for each new token, as ``torch.multinomial`` draws them for one token.

    Args:
        device: ``torch.device`` of the rows.
    """

    def __init__(self, device: Any) -> None:
        self._device = device
        self._generator = deferral.generator_of(device)
        self._rows: list[tuple[Any, Any]] = []  # each with the generator's state after it
        self._state: Any = None  # after the last row that was used

    def rows(self, vocabulary: int, tokens: int) -> Any:
        """Those of the next tokens of the text, (tokens, vocabulary), float32."""
        import torch

        while len(self._rows) < tokens:
            row = torch.empty((1, vocabulary), device=self._device).exponential_()
            self._rows.append((row, self._generator.get_state()))
        return torch.cat([row for row, _ in self._rows[:tokens]])

    def use(self, tokens: int) -> None:
        """The text has grown."""
        self._state = self._rows[tokens - 1][1]
        del self._rows[:tokens]

    def finish(self) -> None:
        """The text has ended: as if nothing had been drawn for tokens that never came."""
        if self._state is not None:
            self._generator.set_state(self._state)
