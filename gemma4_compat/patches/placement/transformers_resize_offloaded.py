"""Token embeddings can be resized while the embedding or its head is offloaded.

Symptom: silent: after ``resize_token_embeddings`` with the embedding on the CPU or on disk, the model returns NaN or
noise. With an offloaded head, or both, the next forward raises ``ValueError: Trying to set a tensor of shape``, and
with ``mean_resizing`` the call itself ``RuntimeError: Tensor.item() cannot be called on meta tensors``.

Cause: ``_resize_token_embeddings`` builds the new weight from the module's parameter, which is on meta, and does not
know where the hook stores the values. The hook keeps the old ones.

Fix: During the call, embedding and head hold their weights (tied ones as one parameter) on the device where they
compute, so the new rows are those of a model on one device with the same seed. Afterwards the new weights are stored
where the old ones were: in host memory, or in a new file in the offload folder. A checkpoint's file is never changed.
If the device has no room for the computation, it is done on the host. Per-layer embeddings are resized in the same
way.

Remove when: ``resize_token_embeddings`` resizes the weights that the hooks of accelerate store.
"""

import logging
from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat._offload.transfer import idle_hooks
from gemma4_compat._offload.weights import gathered_weights
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F40",
    severity="wrong_result",
    affected=">=5.5",
    requires="accelerate",
    needs="transformers-offloaded-embedding transformers-tied-split accelerate-tied-on-disk",
)

_log = logging.getLogger("gemma4_compat")


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._resize_token_embeddings")
def resize_token_embeddings(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not family.has_parts(self):
        return original(self, *args, **kwargs)
    head = self.get_output_embeddings()
    found = _gathered(self, [self.get_input_embeddings, self.get_output_embeddings], original, *args, **kwargs)
    if self.get_output_embeddings() is not head:
        idle_hooks.renew(self)
    return found


@PATCH.replaces(MODELING_GEMMA4, "Gemma4PreTrainedModel._resize_per_layer_embeddings", optional=True)
def resize_per_layer_embeddings(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not self.config.get_text_config().hidden_size_per_layer_input:  # there are none
        return original(self, *args, **kwargs)
    return _gathered(self, [self.get_per_layer_input_embeddings], original, *args, **kwargs)


def _gathered(model: Any, getters: list[Callable[[], Any]], original: Original, *args: Any, **kwargs: Any) -> Any:
    import torch

    try:
        with gathered_weights.gathered(model, getters):
            return original(model, *args, **kwargs)
    except torch.OutOfMemoryError as error:
        _log.warning("gemma4_compat: the embeddings are resized on the CPU: %s", " ".join(str(error).split())[:120])
    with gathered_weights.gathered(model, getters, device="cpu"):
        return original(model, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    def resized(model: Any) -> Any:
        torch.manual_seed(0)
        model.resize_token_embeddings(model.config.get_text_config().vocab_size + 44, mean_resizing=False)
        return model

    reference = workspace.outputs(resized(workspace.load()), text_only=True)
    model = workspace.load_unmarked()
    model = workspace.dispatch(model, "none", "model.language_model.embed_tokens", "lm_head")
    return Outcome.of_parity(workspace.difference(reference, resized(model), text_only=True), "44 tokens added")
