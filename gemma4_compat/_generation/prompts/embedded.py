"""Prompts with images, videos or sounds, and given ``inputs_embeds``, after ``decode_fast``: see :mod:`prompts`.

Towers run without a graph, as pictures have many sizes, and so does what merges their features with the embeddings of
the text and makes masks. Then the forward of the text model is captured by the shape of its inputs, and replayed. The
head, which reads the last position, runs without a graph again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import static_caches

#: Replaces the forward of text models, dormant until `decode_fast`.
PATCH = "transformers-graph-decoding"
#: ``reader(below, inputs)``: returns what ``below(**inputs)``, the forward of the text model, returns.
Reader = Callable[[Callable[..., Any], dict[str, Any]], Any]
_PLAIN = (type(None), bool, int, float, str)

#: Per thread, the text model whose next forward a reader gets.
_inside = threading.local()


class Embedded(prompts.Prompt):
    """A forward of a text model that gets embeddings of several tokens for each row of a batch.

    Args:
        decoding: of the model.
        model: of transformers.
        below: runs the forward.
        inputs: its keyword arguments.
        cache: a static cache.
    """

    reads = "inputs_embeds"

    def __init__(
        self, decoding: Any, model: Any, below: Callable[..., Any], inputs: dict[str, Any], cache: Any
    ) -> None:
        self._below = below
        super().__init__(decoding, model, inputs, cache, static_caches.tensors(cache))

    @classmethod
    def made_of(cls, decoding: Any, model: Any, below: Callable[..., Any], inputs: dict[str, Any]) -> Embedded | None:
        """The forward with these inputs; None if a graph cannot serve it. See the class."""
        import torch

        cache, embeddings = cache_names.cache_in(inputs), inputs.get(cls.reads)
        if cache is None or embeddings is None or not prompts.has_masks(inputs) or not is_short(embeddings):
            return None
        if inputs.get("input_ids") is not None:
            return None
        # A model with inputs of each layer searches its embeddings for those, which no capture permits.
        per_layer = getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0)
        if per_layer and inputs.get("per_layer_inputs") is None:
            return None
        others = [value for name, value in inputs.items() if name != "attention_mask" and value is not cache]
        if not all(isinstance(value, (torch.Tensor, *_PLAIN)) for value in others):
            return None
        return cls(decoding, model, below, inputs, cache)

    def forward(self, inputs: dict[str, Any]) -> Any:
        return self._below(**inputs)


def may_be(inputs: dict[str, Any]) -> bool:
    """Whether the text model may get such a prompt in a call of the model with these inputs, which are no text."""
    read = inputs.get("inputs_embeds") if inputs.get("input_ids") is None else inputs["input_ids"]
    if read is None or not is_short(read) or not static_caches.is_static(cache_names.cache_in(inputs)):
        return False
    if any(inputs.get(name) is not None for name in ("labels", "shared_kv_states")):
        return False
    return bool(inputs.get("logits_to_keep") == 1) and not any(inputs.get(name) for name in prompts.RECORDED)


def is_short(read: Any) -> bool:
    """Whether tokens or embeddings, (batch, tokens, ...), are several and few enough for a graph."""
    rows, tokens = read.shape[:2]
    return bool(1 < tokens <= prompts.MAX_TOKENS // max(rows, 1))


@contextlib.contextmanager
def read_by(reader: Reader, model: Any) -> Iterator[None]:
    """Inside, ``reader`` gets the next forward of the text model of this model in this thread."""
    before = getattr(_inside, "next", None)
    _inside.next = model.get_decoder(), reader
    try:
        yield
    finally:
        _inside.next = before


def waiting(model: Any) -> Reader | None:
    """The reader that gets this forward of a text model; nobody but the first who asks."""
    found = getattr(_inside, "next", None)
    if found is None or found[0] is not model:
        return None
    _inside.next = None
    reader: Reader = found[1]
    return reader
