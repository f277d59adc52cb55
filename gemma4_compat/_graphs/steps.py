"""One step of a ``generate``: its inputs, and what it shares with other steps that the same graph serves."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gemma4_compat._engine.io import terminal
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.quantization import expert_forward
from gemma4_compat._graphs import deferred_stop, fused_steps, signatures, static_caches, unsupported
from gemma4_compat._graphs.captured_calls import REMEMBERED, Call, Known, Pool
from gemma4_compat._graphs.recording import RECORDERS, Recording, capturing
from gemma4_compat._graphs.statistics import Cause, Recapture
from gemma4_compat._kernels import noted
from gemma4_compat._offload.transfer import expert_lookup, streaming

#: Grows with the text, and only the prompt reads it (transformers 5.5; later releases leave it out themselves).
_OF_THE_PROMPT = ("mm_token_type_ids", "token_type_ids")
_FUSING = "fusing the kernels of a CUDA graph, once; what is found is kept for later processes"
_log = logging.getLogger("gemma4_compat")


def _nothing(_rows: int) -> tuple[None, None]:
    """All words matter, and no experts are kept."""
    return None, None


@dataclass(eq=False)
class Graph:
    """One captured step, or one captured forward of a prompt."""

    signature: tuple[Any, ...]
    addresses: tuple[int, ...]  # of the cache's tensors
    recording: Recording
    static: dict[str, Any]  # the inputs that it reads, except the cache, which it must not keep alive
    inputs: list[Any]  # the tensors in them
    outputs: Any  # the same
    pool: Pool
    progress: fused_steps.Progress
    reads_copy: bool = False  # of the head
    reads_slots: bool = False  # of experts


class Step(Call):
    """A forward of one token for each row of a batch, with a static cache that has been filled.

    Args:
        decoding: of the model, a ``decoder.Decoding``.
        model: of transformers.
        inputs: of the model's forward, by name.
        cache: the cache among them.
        found: its tensors.
        head: a ``best_words.Head``, if only its best words matter.
        experts: an ``expert_slots.Kept``, if some stay on the card.

    Attributes:
        inputs: with positions of their own.
        device: of what it reads, a ``torch.device``.
        tensors: the tensors in the inputs, in order.
        sliding: the sliding layers of the cache.
        addresses: of the cache's tensors.
        tokens: how many each row has.
        added: how many of them the cache holds afterwards.
        decodes: whether kernels of this package may compute it; PyTorch reads prompts.
        is_expected: whether there are a few signatures of such steps, so that a new one is nothing to report.
        reads: the input with a row of tokens for each row of a batch.
        progress: of its graph.
        fuses: whether its graph is fused at all.
        statistics: of such calls.
        following: a ``step_inputs.Following`` that gets to know the step, or None.
    """

    decodes, is_expected, reads, progress = True, False, "input_ids", fused_steps.Progress
    following: Any = None

    def __init__(
        self,
        decoding: Any,
        model: Any,
        inputs: dict[str, Any],
        cache: Any,
        found: tuple[Any, ...],
        head: Any = None,
        experts: Any = None,
    ) -> None:
        self.decoding, self.model, self.cache, self._head, self._experts = decoding, model, cache, head, experts
        self.inputs = _with_own_positions(inputs)
        self.device = inputs[self.reads].device
        self.tensors = signatures.tensors(self.inputs)
        self.sliding = static_caches.sliding(cache)
        self.addresses = static_caches.addresses(found)
        self.tokens = self.added = int(inputs[self.reads].shape[1])
        named = self.inputs if head is None else {**self.inputs, "best words": head.most}
        named = named if experts is None else {**named, "experts on the card": experts.key}
        self.signature = self.refused_as = signatures.of(self._update_modes(), named, self.tensors)
        self.fuses, self.statistics = decoding.fuses, decoding.statistics

    @classmethod
    def of(
        cls, decoding: Any, model: Any, inputs: dict[str, Any], copies: Callable[[int], tuple[Any, Any]] = _nothing
    ) -> Step | None:
        """The step with these inputs; None if it reads several tokens, or has another kind of cache.

        ``copies``: returns the head and the experts that :class:`Step` gets, of a batch with so many rows.
        """
        cache, ids = cache_names.cache_in(inputs), inputs.get("input_ids")
        if cache is None or ids is None or ids.ndim != 2 or ids.shape[1] != 1 or not static_caches.is_static(cache):
            return None
        found = static_caches.tensors(cache)
        if found is None:
            return None
        return cls(decoding, model, without_token_types(inputs), cache, found, *copies(len(ids)))

    @property
    def unsupported_reason(self) -> str | None:
        """Why this step cannot be captured, whatever the model."""
        import torch

        if torch.is_grad_enabled():
            return "gradients are enabled"
        if torch.is_autocast_enabled(self.device.type):
            return "autocast keeps casts of weights that a replay would not renew"
        if getattr(torch.nn.utils.parametrize, "_cache_enabled", 0):
            return "torch.nn.utils.parametrize.cached() keeps weights that a replay would not renew"
        for tensor in self.tensors:
            if tensor.device != self.device:
                return "the inputs are on several devices"
        return None

    @property
    def is_in_place(self) -> bool:
        """Whether its cache still has the tensors that it had."""
        found = static_caches.tensors(self.cache) if static_caches.is_static(self.cache) else None
        return found is not None and static_caches.addresses(found) == self.addresses

    def _update_modes(self) -> tuple[Any, ...]:
        """What the update of each sliding layer depends on, which is not in a tensor."""
        return tuple(map(static_caches.window_full, self.sliding))

    def has_settings(self) -> bool:
        """Whether the settings of torch are still those of its signature, and the memory that it reads is there."""
        return self._has_experts and bool(self.signature[3:] == signatures.settings())

    def begins(self, known: Known) -> bool:
        """Whether no other thread has the experts' memory: a prompt, say."""
        return self._has_experts

    @property
    def _has_experts(self) -> bool:
        return self._experts is None or bool(self._experts.is_there)

    def forward(self, inputs: dict[str, Any]) -> Any:
        """Run the model with these inputs, which may be those of a graph."""
        return self.model(**inputs)

    @contextlib.contextmanager
    def numerics(self) -> Iterator[None]:
        """To be entered around each forward."""
        slots = self._experts.layers if self._experts is not None and self._has_experts else {}
        with self.decoding.arithmetic(self.device, self.tokens, self._head), expert_lookup.kept_in(slots):
            yield

    def changes(self) -> list[Any]:
        """The tensors of the cache that it may change, as views."""
        return static_caches.changed_by(self.cache, self.tokens)

    # Why it is captured, or not

    def recapture(self, known: Known) -> Recapture | None:
        """None if no step was captured, or if this one was asked before; prompts have many lengths."""
        if not self.decodes:
            return None
        key = self.addresses, self.signature
        if key in known.evicted:
            known.evicted.remove(key)
            return Recapture(Cause.EVICTED, f"at most {self.decoding.steps.limit} of a model")
        if self.signature in known.captured:
            held = self.decoding.holds_other(self.addresses)
            return Recapture(Cause.CACHE, "the one before is held" if held else "the one before is gone")
        if self.signature in known.seen or not known.captured or self.is_expected:
            return None
        before = known.graphs[-1].signature if known.graphs else next(reversed(known.captured))
        lengths = known.captured[before], static_caches.length(self.cache)
        return Recapture.of(signatures.differences(self.signature, before, self.inputs, lengths))

    def was_captured(self, known: Known) -> None:
        """Keep the length of its cache, in positions."""
        if self.decodes:
            known.captured[self.signature] = static_caches.length(self.cache)

    def unsupported(self, known: Known) -> str | None:
        """What is in the way, once for each signature: a step that ran once can be captured."""
        if self.signature in known.seen:
            return None
        if len(known.seen) == REMEMBERED:  # every step differs from the one before
            return self.unsupported_model() or "the shapes of the inputs change with every token"
        return self.unsupported_model()

    def unsupported_model(self) -> str | None:
        """What of the model is in the way."""
        found = RECORDERS[self.device.type].unsupported_reason()
        rows = len(self.inputs[self.reads]) * (self.tokens if self.decodes else 1)  # of a prompt, the last tokens
        return found or unsupported.unsupported_reason(self.model, unsupported.modules_of_a_step(self.model), rows)

    def note(self, reason: str | BaseException) -> None:
        """In the statistics and the log."""
        self.decoding.reason(reason if isinstance(reason, str) else f"a capture failed with {error_text(reason)}")

    # Capture and replay

    def run_first(self) -> Any:
        """Run the first step of a signature without a graph: libraries set themselves up, hooks settle."""
        if self._experts is not None and self.device.type == "cuda":
            self.decoding.follow_stream(self.device)  # the last replay may still change slots
        with self.numerics(), static_caches.shifted(self.cache):
            return self.forward(self.inputs)

    def capture(self, pool: Pool) -> Graph:
        """Record the step, with inputs of its own."""
        import torch

        with torch.inference_mode(False), torch.no_grad():
            static = _copied(self.inputs)
        fused = self._fused_at_once(static, pool)
        recording, outputs = fused or self.record(static, pool)
        if self.added:  # or somebody else keeps it
            self.decoding.keep_memory(self.cache)
        inputs, own = exchanged(static, self.cache, CACHE), signatures.tensors(static)
        made = self.signature, self.addresses, recording, inputs, own, outputs, pool, self.progress()
        graph = Graph(*made, reads_copy=self._head is not None, reads_slots=self._experts is not None)
        if fused is not None:
            graph.progress.end()
        return graph

    def record(
        self, static: dict[str, Any], pool: Pool, within: fused_steps.Within = contextlib.nullcontext
    ) -> tuple[Recording, Any]:
        """Record the step that reads ``static``, with its output; ``within`` is entered around the forward."""
        streamers = streaming.streamers(self.model)
        recording = RECORDERS[self.device.type](self.device, pool.handle)

        def forward() -> Any:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.numerics())
                stack.enter_context(expert_forward.captured())
                for streamer in streamers:
                    stack.enter_context(streamer.forked())
                settle = stack.enter_context(within())
                if settle is not None:
                    for streamer in streamers:
                        stack.enter_context(streamer.settled(settle))
                return self.forward(static)

        with capturing.held(), static_caches.capturable(self.cache, self.tokens), streaming.captured(streamers):
            outputs = recording.capture(forward)
        return recording, exchanged(outputs, self.cache, CACHE)

    def replay(self, graph: Graph, *, prepared: bool = False) -> Any:
        """Replay the step, and return its outputs; or the graph, if it is ``prepared``: it has its inputs."""
        following, self.following = self.following, None  # it will hold this step
        if following is not None:
            following.compare(graph, self)
        self.launch(graph, () if prepared else self.tensors)
        running = deferred_stop.current() if self.decodes else None
        if running is not None:
            running.launched()
        if not (self.fuses and graph.progress.is_due() and self._replay_fused(graph)):
            graph.recording.replay()
        static_caches.advance(self.sliding, self.added)
        outputs = graph if prepared else exchanged(graph.outputs, CACHE, self.cache, copies=True)
        if following is not None:
            following.replayed(graph, self)
        return outputs

    def launch(self, graph: Graph, given: Sequence[Any]) -> None:
        """Before a replay: wait for the stream of the last one, and give the graph these inputs."""
        if self.device.type == "cuda":
            self.decoding.follow_stream(self.device)
        for static, tensor in zip(graph.inputs, given):
            static.copy_(tensor)

    def _replay_fused(self, graph: Graph) -> bool:
        """Whether this call replayed the step, because its graph is fused from now on."""
        if not self._may_be_fused():
            return False
        begun = time.perf_counter()
        try:
            static = exchanged(graph.static, CACHE, self.cache)
            with graph.pool.growing(self.device), terminal.explained(_FUSING):
                step = self._to_be_fused(static, graph.pool)
                found = fused_steps.fused(step, graph.recording, graph.outputs, graph.progress)
        except Exception as error:  # noqa: BLE001  # whatever it is, the plain graph is there
            self.decoding.reason_not_fused(error_text(error))
            return False
        finally:
            self.statistics.capture_seconds += time.perf_counter() - begun
        if found is not None:
            graph.recording, graph.outputs = found
            self.statistics.fused += 1
        return found is not None

    def _fused_at_once(self, static: dict[str, Any], pool: Pool) -> tuple[Recording, Any] | None:
        """The fused step and its output, if its kernels are known and the text may be long enough for them."""
        left = static_caches.length(self.cache) - (static_caches.held(self.cache) or 0)
        if not (self.decodes and self.fuses and self.progress.may_come(left) and self._may_be_fused()):
            return None

        def run() -> Any:
            with static_caches.capturable(self.cache, self.tokens), self.numerics():
                return exchanged(self.forward(static), self.cache, CACHE)

        if self.device.type == "cuda":
            self.decoding.follow_stream(self.device)
        try:
            found = fused_steps.fused_at_once(self._to_be_fused(static, pool), run)
        except Exception as error:  # noqa: BLE001  # whatever it is, the step can be captured as it is
            self.decoding.reason_not_fused(error_text(error), "at first without fused kernels, with the same bits")
            return None
        self.statistics.fused += found is not None
        return found

    def _may_be_fused(self) -> bool:
        reason = fused_steps.unsupported_reason(self.device)
        if reason is not None:
            _log.debug("gemma4_compat: decoding without fused kernels: %s", reason)
        return reason is None

    def _to_be_fused(self, static: dict[str, Any], pool: Pool) -> fused_steps.Step:
        full = any(map(static_caches.window_full, self.sliding))
        kind = f"{type(self).__name__} {tuple(self.inputs[self.reads].shape[:2])} {self.tokens} tokens, "
        words = "all" if self._head is None else self._head.most
        kind += f"custom {self.decoding.custom}, {words} words, full {full}, {sorted(self.inputs)}"

        def capture(within: fused_steps.Within) -> tuple[Recording, Any]:
            with _in_order(self.model):
                return self.record(static, pool, within)

        return fused_steps.Step(self.device, self.changes, capture, noted.shapes_of(self.model), kind)


@contextlib.contextmanager
def _in_order(model: Any) -> Iterator[None]:
    """Inside, a model computes its kinds of rotary embeddings in the same order in every process, for which it then
    needs the same kernels: it has these kinds in a set of strings.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            kinds = vars(module).get("unique_layer_types")
            if isinstance(kinds, set):
                stack.enter_context(in_place.assigned(module, "unique_layer_types", sorted(kinds)))
        yield


def error_text(error: BaseException) -> str:
    """An error on one line; for a failed capture, its cause."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def _with_own_positions(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a chunk without a view of all positions, whose strides tell how long the text is."""
    import torch

    positions = inputs.get("position_ids")
    if positions is None or positions.ndim != 2 or positions.stride() == (positions.shape[1], 1):
        return inputs
    return inputs | {"position_ids": positions.clone(memory_format=torch.contiguous_format)}


def without_token_types(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs without what is read only to make masks, if the masks are made."""
    if not isinstance(inputs.get("attention_mask"), dict):
        return inputs
    return {name: None if name in _OF_THE_PROMPT else value for name, value in inputs.items()}


def _copied(value: Any) -> Any:
    """An input with copies of the tensors that each replay gets: see :func:`signatures.tensors`. It reads others, as
    in tuples, where they are.
    """
    import torch

    if isinstance(value, dict):
        parts = {name: _copied(part) for name, part in value.items()}
        return parts if type(value) is dict else type(value)(parts)
    return value.clone() if isinstance(value, torch.Tensor) else value


#: Stands for the cache in the inputs and outputs of a captured step, which must not keep it alive.
CACHE = object()


def exchanged(value: Any, one: Any, other: Any, *, copies: bool = False) -> Any:
    """The same with ``other`` in the place of ``one``; ``copies``: with its own copies of the tensors."""
    import torch

    if value is one:
        return other
    if isinstance(value, torch.Tensor):
        return value.clone() if copies else value
    if isinstance(value, dict):
        parts = {name: exchanged(part, one, other, copies=copies) for name, part in value.items()}
        return parts if type(value) is dict else type(value)(**parts)  # a ModelOutput
    if isinstance(value, (tuple, list)):
        return type(value)([exchanged(part, one, other, copies=copies) for part in value])
    return value
