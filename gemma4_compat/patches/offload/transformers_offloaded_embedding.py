"""Models with per-layer embeddings run with embed_tokens on the CPU or on disk.

Symptom: ``RuntimeError: Tensor on device meta is not on the expected device cuda:0!`` in the first forward, as soon
as ``embed_tokens`` is on the CPU or on disk.

Cause: Models with per-layer embeddings read the embedding weight directly, outside the embedding's forward, where
accelerate's hook has not onloaded it. ``Gemma4Model.forward`` reads the row of the padding token every time.
``Gemma4TextModel.get_per_layer_inputs`` reads the whole weight when the model gets ``inputs_embeds`` and has to find
out which tokens they were. From its second step on, the decoder of a DiffusionGemma multiplies by the whole weight: on
meta that is nonsense (``RuntimeError: probability tensor contains either `inf`, `nan` or element < 0``), and with the
embedding on another device it raises.

Fix: While such a model runs, an offloaded embedding has a stand-in weight between its own forwards, with the padding
row in every place: one row, expanded without taking memory. The stand-in is removed for the forward of the embedding,
including that of an adapter layer around it, which may need the real weight (DoRA). To search the whole weight, the
embedding is onloaded as for a forward. So it is for a step of a DiffusionGemma, and the logits of the step before go
to its device.

Remove when: transformers calls the embedding instead of reading ``embed_tokens.weight`` outside the embedding's
forward.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import hooked
from gemma4_compat._gemma4.accelerate.module_hooks import execution_device, hook_device, hooks_off, offload_hook
from gemma4_compat._gemma4.models import padding_row, walk
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import row_lookup
from gemma4_compat.patches.api import MODELING_DIFFUSION, MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F11 F38 F42", severity="crash", affected=">=5.5", requires="accelerate", needs="accelerate-tied-on-disk"
)
PATCH.replaces(**hooked.ADD_HOOK)(hooked.activator(PATCH.id))


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.forward", dormant=hooked.no_hooks)
def model_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    embedding = walk.in_use(self.language_model.embed_tokens)
    config = self.config.text_config
    # A QAT checkpoint's embedding has no weight of its own; another patch covers it.
    if offload_hook(embedding) is None or "weight" not in embedding._parameters:
        return original(self, *args, **kwargs)
    if not config.hidden_size_per_layer_input:
        return original(self, *args, **kwargs)
    row = _padding_row(embedding, config.pad_token_id)
    with padding_row.between_forwards(self.language_model.embed_tokens, embedding, row):
        return original(self, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.get_per_layer_inputs", dormant=hooked.no_hooks)
def get_per_layer_inputs(original: Original, self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    embedding = walk.in_use(self.embed_tokens) if input_ids is None else None
    if embedding is None or offload_hook(embedding) is None or "weight" not in embedding._parameters:
        return original(self, input_ids, *args, **kwargs)
    with _onloaded(embedding):
        return original(self, input_ids, *args, **kwargs)


@PATCH.replaces(MODELING_DIFFUSION, "DiffusionGemmaDecoderModel.forward", group="diffusion_gemma")
def decoder_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    embedding = walk.in_use(self.embed_tokens)
    device = hook_device(walk.innermost(self.embed_tokens))
    logits = kwargs.get("self_conditioning_logits")
    if device is None or logits is None:
        return original(self, *args, **kwargs)
    kwargs["self_conditioning_logits"] = logits.to(device)
    hook = offload_hook(embedding)
    if hook is None:
        return original(self, *args, **kwargs)
    hook.pre_forward(embedding)
    try:
        with hooks_off([embedding]):
            return original(self, *args, **kwargs)
    finally:
        hook.post_forward(embedding, None)


def _padding_row(embedding: Any, token: int) -> Any:
    """The row of ``token`` on the compute device: in place, if rows are looked up so. A copy ends a capture."""
    hook = offload_hook(embedding)
    lookup = row_lookup.known(hook)
    if lookup is not None and lookup.in_place and lookup.is_current(hook, embedding):
        return lookup.weight[token]
    stored = host_memory.stored(hook.weights_map, "weight")  # the map itself would read the whole weight
    return host_memory.cast(stored.raw[token], (*stored.casts, embedding.weight.dtype)).to(execution_device(embedding))


@contextlib.contextmanager
def _onloaded(embedding: Any) -> Iterator[None]:
    hook = offload_hook(embedding)
    before = embedding.weight
    hook.pre_forward(embedding)
    try:
        yield
    finally:
        hook.post_forward(embedding, None)
        embedding._parameters["weight"] = before


def reproduce(workspace: Workspace) -> Outcome:
    reference = workspace.reference()
    model = workspace.load()
    model = workspace.dispatch(model, "none", "model.language_model.embed_tokens", "lm_head")
    return Outcome.of_parity(workspace.difference(reference, model), "embed_tokens offloaded")
