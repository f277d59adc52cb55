"""A speculative step of decoding with drafts: an assistant drafts tokens, and the model reads them at once.

Both are steps that are captured and replayed as those of one token are. The model's forward also decides, on the
device, how many drafts are right, and returns what the next step starts from; the host reads one small tensor, while
the next one is running already.

A token is chosen from the model's scores as without drafts. Sampling takes, as ``torch.multinomial`` does, the largest
quotient of a probability and an exponentially distributed number, and each place of the text has its own row of such
numbers, drawn in the order of the text. So which token comes out does not depend on what was drafted. The assistant
gets the same numbers, so that the better it knows the model's distribution, the likelier it drafts the same token.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._engine.runtime.host_copy import HostCopy
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation.sampling import fast_processors
from gemma4_compat._generation.speculative.draft_windows import Windows
from gemma4_compat._graphs import decoder, signatures, static_caches, steps

#: Tokens of a speculative step: kernels of this package compute so many, each as if it were the only one.
MAX_TOKENS = 8
#: transformers' processors that read scores only, so that a graph may have them.
_OF_SCORES = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")


@dataclass(frozen=True)
class Choice:
    """How a token is chosen from scores.

    Attributes:
        samples: whether it is drawn; otherwise it is the likeliest.
        key: what decides, hashable.
        processors: transformers' logits processors.
    """

    samples: bool
    key: tuple[Any, ...]
    processors: tuple[Any, ...] = field(compare=False, repr=False)

    @classmethod
    def of(cls, processors: Sequence[Any], *, samples: bool) -> Choice:
        """The choice with those of these processors that read scores only."""
        own = tuple(one for one in processors if reads_scores_only(one))
        key = tuple((type(one).__name__, tuple(sorted(vars(one).items()))) for one in own)
        return cls(samples, key, own)

    def token(self, ids: Any, scores: Any, noise: Any) -> Any:
        """The token after ``ids``, (1, length): (1,).

        Args:
            ids: the text before it.
            scores: (1, vocabulary), float32.
            noise: exponentially distributed, as ``scores``; None unless it ``samples``.
        """
        return self._of_rows(ids, scores, noise)

    def tokens(self, text: Any, scores: Any, noise: Any) -> Any:
        """The token after the last of ``text``, and that after each place before: (1, tokens).

        Args:
            text: (1, length); more than its end matters only to processors that read it.
            scores: (1, tokens, vocabulary), float32.
            noise: (tokens, vocabulary); None unless it ``samples``.
        """
        import torch

        # PyTorch adds up rows in the same order only if each begins at an address that 16 bytes divide.
        if all(map(reads_scores_only, self.processors)) and not scores.shape[-1] % 4:
            return self._of_rows(text, scores[0], noise)[None]
        found, before = [], text.shape[1] - scores.shape[1] + 1
        for row in range(scores.shape[1]):
            own = None if noise is None else noise[row : row + 1]
            found.append(self.token(text[:, : before + row], scores[:, row], own))
        return torch.stack(found, dim=1)

    def _of_rows(self, ids: Any, scores: Any, noise: Any) -> Any:
        """The token of each row, (rows, vocabulary), as in a call of its own. With several rows, nothing reads ids."""
        *called, last = fast_processors.paired(self.processors) or [None]
        for processor in called:
            scores = _of_each(processor, ids, scores)
        if self.samples and isinstance(last, fast_processors.TopTokens):
            return last.drawn(scores, noise)
        if last is not None:
            scores = _of_each(last, ids, scores)
        return (scores.softmax(dim=-1) / noise if self.samples else scores).argmax(dim=-1)


def _of_each(processor: Any, ids: Any, scores: Any) -> Any:
    return processor.rows(scores) if isinstance(processor, fast_processors.TopTokens) else processor(ids, scores)


def reads_scores_only(processor: Any) -> bool:
    """Whether a logits processor is one of transformers' that read nothing but scores."""
    return any(fast_processors.is_class(processor, name) for name in _OF_SCORES)


def accept(choice: Choice, ids: Any, read: dict[str, Any], drafts: Any, noise: Any) -> dict[str, Any]:
    """What a speculative step gives, on the device.

    Args:
        choice: of tokens.
        ids: (1, length), the text before the drafts; in a graph only its newest token.
        read: ``scores``, (1, tokens, vocabulary), and ``states``, (1, tokens, width), of the newest token and drafts;
            ``held``, of no dimension, how many tokens were held before.
        drafts: (1, tokens - 1).
        noise: (tokens, vocabulary) or None.

    Returns:
        ``verdict``, (1, tokens + 1): the chosen tokens, then how many drafts are right; ``newest``, (1, 1): the last
        token of the text from now on; ``hidden``, (1, 1, width): the model's last state before it; ``grown``: by how
        many tokens the text has grown; ``held``, how many tokens are held from now on; ``states``.
    """
    import torch

    chosen = choice.tokens(torch.cat((ids, drafts), dim=1), read["scores"], noise)
    right = (chosen[:, :-1] == drafts).long().cumprod(dim=-1).sum(dim=-1, keepdim=True)
    grown = right.sum() + 1
    return {
        "verdict": torch.cat((chosen, right), dim=1),
        "newest": chosen.gather(1, right),
        "hidden": read["states"].index_select(1, right[0]),
        "grown": grown,
        "held": read["held"] + grown,
        "states": read["states"],
    }


class Launched:
    """A speculative step that runs on the device.

    Args:
        drafts: that it has.
        verdict: as :func:`accept` returns it.
        grown: the same.
        begun: when it began, in seconds.
        before: what differs afterwards if it did what other speculative steps do not; None if its time says nothing.
    """

    def __init__(self, drafts: int, verdict: Any, grown: Any, begun: float, before: list[float] | None) -> None:
        self.drafts, self.verdict, self.grown, self.begun, self.before = drafts, verdict, grown, begun, before
        self._copy = HostCopy(verdict[0])

    def read(self) -> list[int]:
        """``verdict``, once the device has it."""
        return self._copy.tolist()


class _SpeculativeStep(steps.Step):
    """A forward of a model or an assistant with windows of its own; the rest as in :class:`steps.Step`."""

    is_expected, reads = True, "newest"

    def __init__(
        self, model: Any, inputs: dict[str, Any], cache: Any, windows: Windows, *, tokens: int, experts: Any = None
    ) -> None:
        found = static_caches.tensors(cache)
        assert found is not None  # it has read a prompt
        self.windows = windows
        super().__init__(decoder.of(model), model, inputs, cache, found, experts=experts)
        self.sliding, self.added, self.tokens = [], 0, tokens

    def renew(self, inputs: dict[str, Any]) -> None:
        """Have the next replay read these inputs, which have the shapes of those before."""
        self.tensors = signatures.tensors(inputs)

    def _update_modes(self) -> tuple[Any, ...]:
        return ()

    def changes(self) -> list[Any]:
        return []


class VerifyStep(_SpeculativeStep):
    """The model reads the newest token and drafts after it.

    Args:
        model: of transformers.
        inputs: ``newest``, (1, 1); ``drafts``, (1, n); ``held``, how many tokens the cache holds, of no dimension;
            ``noise``, (n + 1, vocabulary) or None; ``choice``, or None if the host decides.
        cache: of this ``generate``.
        windows: its sliding layers.
        held: the same as the host knows it: at least, and at most.
        experts: as of :class:`steps.Step`.
    """

    def __init__(
        self,
        model: Any,
        inputs: dict[str, Any],
        cache: Any,
        windows: Windows,
        held: tuple[int, int],
        experts: Any = None,
    ) -> None:
        self.held = held
        named = inputs | {cache_names.NEW: cache, "windows": windows.addresses}
        super().__init__(model, named, cache, windows, tokens=1 + inputs["drafts"].shape[1], experts=experts)

    def forward(self, inputs: dict[str, Any]) -> Any:
        import torch

        newest, drafts, choice = inputs["newest"], inputs["drafts"], inputs["choice"]
        positions = inputs["held"] + torch.arange(self.tokens, device=newest.device)
        given = {
            "input_ids": torch.cat((newest, drafts), dim=1),
            "position_ids": positions[None],
            "attention_mask": self.windows.masks(positions),
            cache_names.of(type(self.model).forward): self.cache,
            "use_cache": True,
            "return_dict": True,
        }
        with self.windows.written(self.cache, positions), _read_by_head(self.model) as states:
            scores = self.model(**given).logits.float()
        read = {"scores": scores, "states": states[0], "held": inputs["held"]}
        return read if choice is None else accept(choice, newest, read, drafts, inputs["noise"])

    def changes(self) -> list[Any]:
        least, most = self.held
        return self.windows.changes(self.cache, least, most - least + self.tokens)


@contextlib.contextmanager
def _read_by_head(model: Any) -> Iterator[list[Any]]:
    """A list that fills with what the head reads in this thread: others may read a prompt meanwhile."""
    found: list[Any] = []
    thread = threading.get_ident()

    def note(_: Any, args: Any) -> None:
        if threading.get_ident() == thread:
            found.append(args[0])

    handle = model.get_output_embeddings().register_forward_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


class DraftStep(_SpeculativeStep):
    """An assistant drafts tokens.

    Args:
        assistant: drafts.
        inputs: ``newest``, ``held``, ``noise`` and ``choice`` as in :class:`VerifyStep`, of the places drafted for;
            ``hidden``, (1, 1, width); ``drafts``, how many there are to be.
        cache: the model's.
        windows: its sliding layers.
        model: whose embeddings the assistant reads.
        version: hashable; it changes where those embeddings may have moved.
    """

    def __init__(
        self, assistant: Any, inputs: dict[str, Any], cache: Any, windows: Windows, model: Any, version: Any
    ) -> None:
        self._whose = model
        named = inputs | {cache_names.NEW: cache, "windows": windows.addresses, "version": version}
        super().__init__(assistant, named, cache, windows, tokens=1)

    def forward(self, inputs: dict[str, Any]) -> Any:
        import torch

        token, hidden, held, choice = (inputs[name] for name in ("newest", "hidden", "held", "choice"))
        masks = self.windows.drafting_masks(held)
        shared = self.windows.shared(self.cache, own_kinds(self._whose))
        embedding = self._whose.get_input_embeddings()
        found: list[Any] = []
        with _without_the_host(self.model, masks):
            for place in range(inputs["drafts"]):
                outputs = self.model(
                    inputs_embeds=torch.cat((embedding(token), hidden), dim=-1),
                    attention_mask=None,
                    position_ids=held[None, None],
                    shared_kv_states=shared,
                    use_cache=False,
                )
                own = None if inputs["noise"] is None else inputs["noise"][place : place + 1]
                token = choice.token(token, outputs.logits[:, -1].float(), own)[:, None]
                hidden = outputs.last_hidden_state
                found.append(token)
        return {"drafts": torch.cat(found, dim=1)}


def own_kinds(model: Any) -> list[str]:
    """The kinds of the layers that have keys of their own, in order."""
    text = model.config.get_text_config()
    shared = int(getattr(text, "num_kv_shared_layers", 0) or 0)
    return list(text.layer_types[: len(text.layer_types) - shared])


@contextlib.contextmanager
def _without_the_host(assistant: Any, masks: dict[str, Any]) -> Iterator[None]:
    """Inside, in this thread, an assistant has these masks, and reads no number on the host."""
    thread = threading.get_ident()

    def here(replacement: Any) -> Any:
        return lambda below, *args: (replacement if threading.get_ident() == thread else below)(*args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place.replaced(assistant, "create_attention_masks", here(lambda *_: masks)))
        embedder = getattr(assistant, "masked_embedding", None)
        if embedder is not None:
            likely = here(lambda *args: _likely(embedder, *args))
            stack.enter_context(in_place.replaced(embedder, "forward", likely))
        yield


def _likely(embedder: Any, hidden: Any, weight: Any) -> Any:
    """``Gemma4AssistantMaskedEmbedder.forward`` without a look at the smallest logit on the host."""
    import torch

    batch, tokens = hidden.shape[:2]
    _, nearest = torch.topk(embedder.centroids(hidden), k=embedder.centroid_intermediate_top_k, dim=-1)
    order = embedder.token_ordering.long().view(embedder.num_centroids, embedder.vocab_size_per_centroid)
    ids = order[nearest].view(batch, tokens, -1)
    logits = (hidden.unsqueeze(-2) @ weight[ids].transpose(-1, -2)).squeeze(-2)
    least = (logits.amin().float() - 1.0).to(hidden.dtype)
    return least.expand(batch, tokens, embedder.vocab_size).clone().scatter_(-1, ids, logits)
