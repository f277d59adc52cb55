"""Reentrant gradient checkpointing gives correct gradients in towers, and where layers share keys and values.

Symptom: silent: with ``use_reentrant=True`` the loss is right, but what is trained in the vision and audio towers gets
no gradient, on every model that has towers. On E2B and E4B, keys and values that later layers share lose the gradient
from those layers (cosine with the correct gradient down to 0.4), and so does every layer before them. PEFT's
``prepare_model_for_kbit_training`` requests reentrant checkpointing by default, because it does not pass
``use_reentrant``.

Cause: A reentrant ``torch.utils.checkpoint`` passes gradients through its positional arguments only. Gemma 4's
KV-shared layers read the keys and values of an earlier layer from a container, where the first run, which has no
gradients, left them. The first layer of a tower gets pixels or sound, which require no gradient, and
``enable_input_require_grads`` only reaches embeddings of tokens.

Fix: ``PreTrainedModel._set_gradient_checkpointing`` enables non-reentrant checkpointing for a Gemma 4 model with
KV-shared layers, whether the model, PEFT or the Trainer requests it. This saves the same memory. If the caller passed
``use_reentrant=True`` explicitly, a ``Gemma4CompatWarning`` says so. In other models, only the layers of towers are
checkpointed this way; the others are as requested. Other arguments of the checkpoint function are kept. Custom
checkpoint functions are not changed.

Remove when: transformers refuses or fixes reentrant checkpointing of KV-shared layers and of towers.
"""

import functools
import warnings
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._errors import Gemma4CompatWarning
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F19 F117", severity="wrong_result", affected=">=5.5", needs="transformers-uncached-sharing")

_KEYWORD = "use_reentrant"


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._set_gradient_checkpointing")
def set_gradient_checkpointing(
    original: Original,
    self: Any,
    enable: bool = True,
    gradient_checkpointing_func: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    import torch

    function = gradient_checkpointing_func or torch.utils.checkpoint.checkpoint  # upstream's default
    if not enable or not _is_reentrant(function):
        return original(self, enable, function, *args, **kwargs)
    right = functools.partial(function, use_reentrant=False)
    if _shares_keys_and_values(self):
        if getattr(function, "keywords", {}).get(_KEYWORD):
            notice.warn_user(
                f"use_reentrant=True gives wrong gradients in {type(self).__name__}, whose layers share keys and "
                "values: it is checkpointed with use_reentrant=False, which saves the same memory. Pass "
                "gradient_checkpointing_kwargs={'use_reentrant': False} to say so yourself."
            )
        return original(self, enable, right, *args, **kwargs)
    result = original(self, enable, function, *args, **kwargs)
    for module in self.modules():
        if hasattr(module, "gradient_checkpointing") and _is_of_a_tower(module):
            module._gradient_checkpointing_func = right
    return result


def _is_reentrant(function: Any) -> bool:
    """Whether this is PyTorch's reentrant checkpoint (its default), or transformers' wrapper around it."""
    inner = function.func if isinstance(function, functools.partial) else function
    if getattr(inner, "__module__", None) not in ("torch.utils.checkpoint", "transformers.modeling_utils"):
        return False  # a custom function with its own arguments
    requested = getattr(function, "keywords", {}).get(_KEYWORD)
    return requested is None or bool(requested)


def _shares_keys_and_values(model: Any) -> bool:
    return any(
        getattr(module, "is_kv_shared_layer", False) and family.is_gemma4_module(module) for module in model.modules()
    )


def _is_of_a_tower(module: Any) -> bool:
    return any(kind.__name__.startswith(("Gemma4Vision", "Gemma4Audio")) for kind in type(module).__mro__)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    def step(reentrant: bool | None) -> tuple[float, dict[str, Any]]:
        model = workspace.load().train()
        if reentrant is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={_KEYWORD: reentrant})
        batch = workspace.inputs()
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        return loss.item(), {
            name: weight.grad.float().flatten()
            for name, weight in model.named_parameters()
            if weight.grad is not None and name.endswith(("k_proj.weight", "v_proj.weight"))
        }

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Gemma4CompatWarning)
        (loss, right), (same, found) = step(None), step(True)
    if loss != same:
        return Outcome(True, f"checkpointing changes the loss from {loss:.4g} to {same:.4g}")
    cosine, name = min((torch.cosine_similarity(right[name], found[name], dim=0).item(), name) for name in right)
    if cosine < 0.9999:
        return Outcome(True, f"the loss is right; the gradient of {name} has cosine {cosine:.2f} with the right one")
    worst = max((right[name] - found[name]).abs().max().item() for name in right)
    return Outcome(worst > 0, f"gradients of {len(right)} key and value projections differ by {worst:.3g}", worst)
