"""A Gemma 4 drafts with its own first layers (``assistant_early_exit``).

Symptom: ``AttributeError: 'Gemma4Config' object has no attribute 'num_hidden_layers'`` from ``generate`` with
``assistant_early_exit``. A text model with per-layer embeddings (E2B, E4B) raises ``RuntimeError: shape '[1, 24, 3,
64]' is invalid for input of size 9216`` instead, and in newer releases other text models ``ValueError: The set of
layer types producing a cache is different than the set of layer types using them``. After the error the model still
exits early: all later texts are wrong.

Cause: ``EarlyExitCandidateGenerator`` writes the number of layers into the outer configuration, which a multimodal
model does not have. In the text model's own configuration that number also gives the width of the per-layer
embeddings and the layers of the cache. It is put back only if the draft succeeds.

Fix: While it drafts, the text model of a Gemma 4 runs only its first N layers, in this thread. The configuration
stays as it is. The tokens are those of ``generate`` without ``assistant_early_exit``.

Remove when: ``EarlyExitCandidateGenerator`` can draft with a Gemma 4 of every size in all supported releases.
"""

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F126", severity="crash", affected=">=5.5.0")

_swapping = threading.Lock()


@PATCH.replaces("transformers.generation.candidate_generator", "EarlyExitCandidateGenerator.get_candidates")
def get_candidates(original: Original, self: Any, input_ids: Any, **kwargs: Any) -> Any:
    model = self.assistant_model
    if not is_gemma4_config(model.config):
        return original(self, input_ids, **kwargs)
    from transformers.generation import candidate_generator

    self.generation_config.disable_compile = True  # a replayed step would run every layer
    text = model.base_model
    with _first_layers(getattr(text, "language_model", text), self.assistant_early_exit):
        found = candidate_generator.AssistedCandidateGenerator.get_candidates(self, input_ids)
    cache = cache_names.cache_in(self.assistant_kwargs)
    if cache is not None:  # without its layers that hold nothing, which newer releases cannot crop
        del cache.layers[self.assistant_early_exit :]
    return found


@contextlib.contextmanager
def _first_layers(text: Any, number: int) -> Iterator[None]:
    """In this thread, forwards of the text model run its first ``number`` layers. Its modules stay the same."""
    thread = threading.get_ident()
    with _swapping:
        layers = text.layers
        if not hasattr(layers, "numbers"):
            layers = text._modules["layers"] = _shorter(layers)
        layers.numbers[thread] = number
    try:
        yield
    finally:
        with _swapping:
            del layers.numbers[thread]
            if not layers.numbers:
                text._modules["layers"] = layers.whole


def _shorter(whole: Any) -> Any:
    """A list of the same layers. For the threads in ``numbers``, its slices end earlier."""

    class Shorter(type(whole)):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            found = self.whole[index]
            number = self.numbers.get(threading.get_ident())
            return found if number is None or not isinstance(index, slice) else found[:number]

    found = copy.copy(whole)
    found.__class__ = Shorter
    vars(found).update(whole=whole, numbers={})
    return found


def reproduce(workspace: Workspace) -> Outcome:
    found = []
    for model, batch in (
        (workspace.load_text(), workspace.inputs(text_only=True)),
        (workspace.load(), workspace.inputs()),
    ):
        options = {"max_new_tokens": 8, "do_sample": False}
        expected = model.generate(**batch, **options)
        found.append(expected.equal(model.generate(**batch, **options, assistant_early_exit=3)))
    if all(found):
        return Outcome(False, "8 tokens with drafts of the first three layers are those without")
    return Outcome(True, "with drafts of the first three layers other tokens are generated")
