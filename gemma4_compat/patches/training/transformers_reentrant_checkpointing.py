"""silent: with ``use_reentrant=True`` (PEFT's ``prepare_model_for_kbit_training`` asks for it by saying nothing) the
loss is right and gradients are wrong. Keys and values that later layers share lose those layers' share of the gradient
(cosine with the right one down to 0.4), and with it every layer before them; adapters in the vision tower get none.

Why: a reentrant checkpoint passes gradients through its positional arguments only. Gemma 4's KV-shared layers read the
keys and values of an earlier layer out of a container, where the first, gradient-less run left them; the tower's first
layer gets pixels, which want no gradient.

Here: a Gemma 4 model with KV-shared layers is checkpointed without reentry, which saves the same memory, whoever asks
for it: the model, PEFT or the Trainer. Whoever has asked for reentry by name is told so. Models without such layers,
and towers that are enabled by themselves, are checkpointed as asked.

Goes when transformers refuses or repairs the combination.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._errors import Gemma4CompatWarning
from gemma4_compat._models import family

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_KEYWORD = "use_reentrant"


def set_gradient_checkpointing(
    original: Callable[..., Any],
    self: Any,
    enable: bool = True,
    gradient_checkpointing_func: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    import torch

    function = gradient_checkpointing_func or torch.utils.checkpoint.checkpoint  # upstream's default
    if enable and _is_reentrant(function) and _shares_keys_and_values(self):
        if getattr(function, "keywords", {}).get(_KEYWORD):
            warnings.warn(
                f"use_reentrant=True gives wrong gradients in {type(self).__name__}, whose layers share keys and "
                "values: it is checkpointed with use_reentrant=False, which saves the same memory. Pass "
                "gradient_checkpointing_kwargs={'use_reentrant': False} to say so yourself.",
                Gemma4CompatWarning,
                stacklevel=4,
            )
        function = functools.partial(function, use_reentrant=False)
    return original(self, enable, function, *args, **kwargs)


def _is_reentrant(function: Any) -> bool:
    """Whether this is PyTorch's checkpoint, or transformers' around it, as its reentrant kind (its default)."""
    inner = function.func if isinstance(function, functools.partial) else function
    if getattr(inner, "__module__", None) not in ("torch.utils.checkpoint", "transformers.modeling_utils"):
        return False  # somebody's own, with arguments of its own
    asked = getattr(function, "keywords", {}).get(_KEYWORD)
    return asked is None or bool(asked)


def _shares_keys_and_values(model: Any) -> bool:
    return any(
        getattr(module, "is_kv_shared_layer", False) and family.is_gemma4_module(module) for module in model.modules()
    )


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


PATCH = Patch(
    id="transformers-reentrant-checkpointing",
    summary="reentrant gradient checkpointing gives right gradients on models whose layers share keys and values",
    symptom="silent: with use_reentrant=True the loss is right, gradients of keys and values are wrong",
    severity=Severity.WRONG_RESULT,
    failure_points=("F19",),
    distribution="transformers",
    affected=">=5.5",
    measured="5.23.0",
    retire_when="transformers refuses or repairs reentrant checkpointing of KV-shared layers",
    targets=(
        Target(
            module="transformers.modeling_utils",
            name="PreTrainedModel._set_gradient_checkpointing",
            replacement=set_gradient_checkpointing,
            known={
                "ea10c1f7ace1": "5.5.0 - 5.6.2",
                "9f26e8e1d3c6": "5.7.0 - 5.15.1",
                "b847fc875700": "5.16.0 - 5.23.0",
            },
        ),
    ),
    reproduce=reproduce,
)
