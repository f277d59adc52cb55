"""Reading one row of a QAT checkpoint's embedding does not dequantize all of it, and it can be offloaded.

Symptom: silent: each forward of a multimodal model with per-layer embeddings dequantizes all of ``embed_tokens``,
262,144 rows, to read only that of the padding token: seconds on a CPU, for each generated token. With ``embed_tokens``
on the CPU or on disk ``RuntimeError: Tensor on device meta is not on the expected device``.

Cause: ``Gemma4Model.forward`` reads ``embed_tokens.weight[pad_token_id, :]``. In ``QuantizedEmbedding`` the weight is
a property that dequantizes the whole embedding, outside the forward for which accelerate's hook onloads it.

Fix: While such a model runs on token ids, its embedding's weight is the row of the padding token, dequantized from
where it is stored, in every place: expanded, without taking memory. Any other read, such as that of a model that gets
only ``inputs_embeds``, gives the whole weight, onloaded if need be. A compiled forward is left to the compiler, which
reads one row by itself.

Remove when: ``Gemma4Model.forward`` calls the embedding instead of reading its weight.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._gemma4.quantization import qat
from gemma4_compat._offload import host_memory
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F56", severity="speed", affected=">=5.11", acts_on="QAT checkpoints")

_PARTS = ("embedding_quantized", "embedding_scale")


class _Running(threading.local):
    """The embeddings of this thread's running models, by ``id``, and their padding tokens."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}


_running = _Running()


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.forward")
def model_forward(original: Original, self: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> Any:
    import torch

    embedding = walk.in_use(self.language_model.embed_tokens)
    config = self.config.text_config
    if input_ids is None or not qat.is_embedding(embedding) or not config.hidden_size_per_layer_input:
        return original(self, input_ids, *args, **kwargs)
    if torch.compiler.is_compiling():
        return original(self, input_ids, *args, **kwargs)
    with _one_row(embedding, config.pad_token_id):
        return original(self, input_ids, *args, **kwargs)


@contextlib.contextmanager
def _one_row(embedding: Any, token: int) -> Iterator[None]:
    before = _running.tokens
    _running.tokens = {**before, id(embedding): token}
    try:
        yield
    finally:
        _running.tokens = before


@PATCH.replaces("transformers.integrations.gemma_quant", "QuantizedEmbedding.weight")
def weight(original: Callable[[Any], Any], self: Any) -> Any:
    token = _running.tokens.get(id(self)) if _running.tokens else None
    hook = module_hooks.offload_hook(self)
    away = hook is not None and module_hooks.is_offloaded(self)
    if token is None:
        if not away:
            return original(self)
        hook.pre_forward(self)
        try:
            return original(self)
        finally:
            hook.post_forward(self, None)
    rows = [_stored_row(hook, name, token) if away else getattr(self, name)[token : token + 1] for name in _PARTS]
    if away:
        device = module_hooks.execution_device(self)
        rows = [row.to(device) for row in rows]
    return self._dequantize_weights(*rows).expand(self.num_embeddings, -1)


def _stored_row(hook: Any, name: str, token: int) -> Any:
    stored = host_memory.stored(hook.weights_map, name)
    return host_memory.cast(stored.raw[token : token + 1], stored.casts)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny

    workspace.needs("per_layer_embeddings")
    checkpoint = workspace.qat(grouped=False)  # loads on every release
    model = tiny.load(checkpoint, device=workspace.main)
    embedding = model.get_input_embeddings()
    dequantize, sizes = embedding._dequantize_weights, []

    def watched(quantized: Any, scales: Any) -> Any:
        sizes.append(quantized.numel() // quantized.shape[-1])
        return dequantize(quantized, scales)

    embedding._dequantize_weights = watched
    inputs = workspace.inputs(text_only=True)
    with torch.no_grad():
        model.model(**inputs)
    del embedding._dequantize_weights
    if max(sizes) > inputs["input_ids"].numel():
        return Outcome(True, f"a forward dequantizes {max(sizes)} rows of the embedding for one of them")
    reference = workspace.outputs(model)
    name = "model.language_model.embed_tokens"
    split = tiny.load(checkpoint, device=workspace.main)
    split = workspace.dispatch(split, "none", name)
    return Outcome.of_parity(workspace.difference(reference, split), "the embedding offloaded")
