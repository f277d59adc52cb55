"""Gradient checkpointing releases a step whose backward pass did not run, or failed.

Symptom: silent: after a forward in training mode with ``gradient_checkpointing_enable()`` whose backward pass never
ran, or raised ``torch.OutOfMemoryError``, memory stays allocated until the process ends; ``gc.collect()`` and
``torch.cuda.empty_cache()`` do not help. A training that skips losses of NaN loses some in each skipped step.
``auto_find_batch_size`` and accelerate's ``find_executable_batch_size`` try again with less than the card has.

Cause: ``Gemma4TextModel.forward`` creates one container, ``shared_kv_states``, and passes it to each layer. The last
layer of each type stores its keys and values there, whether others share them or not, and with them their graph. A
checkpoint keeps the arguments of its layer until the layer's backward pass, so it keeps the container, and the
container keeps a graph that leads back to the checkpoint. Python's garbage collector does not see into a graph.

Fix: A layer that is checkpointed gets a container of its own: with the keys and values that are there if it reads
them, else empty. What it stores goes to the container of the model, and leaves its own. Loss and gradients have the
same bits. Layers cost nothing more until checkpointing is first turned on for a Gemma 4 model, or a pickle of one with
checkpointing on is loaded.

Remove when: a checkpoint of transformers no longer keeps a container that its layer writes to.
"""

import gc
from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat._gemma4.cache import shared_kv
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F114", severity="memory", affected=">=5.5.2")


def _is_dormant(late: bool) -> bool:
    """Checkpointing may be on already in models from before."""
    return not late


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextDecoderLayer.__call__", dormant=_is_dormant, group="gemma4")
@PATCH.replaces(
    MODELING_UNIFIED, "Gemma4UnifiedTextDecoderLayer.__call__", dormant=_is_dormant, group="gemma4_unified"
)
def decoder_layer(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return shared_kv.checkpointed_layer(original, self, *args, **kwargs)


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._set_gradient_checkpointing")
def set_gradient_checkpointing(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if any(map(family.is_gemma4_module, self.modules())):  # it may be inside another model
        dormant.activate(PATCH.id)
    return original(self, *args, **kwargs)


@PATCH.replaces("transformers.modeling_layers", "GradientCheckpointingLayer.__setstate__", activator=True)
def set_state(original: Original, self: Any, state: dict[str, Any]) -> Any:
    """A layer is unpickled: checkpointing may be on, and nobody turns it on again."""
    if state.get(checkpointing.FLAG) and family.is_gemma4_module(self):
        dormant.activate(PATCH.id)
    return original(self, state)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import scenarios

    return scenarios.of_both_classes(workspace, gemma4=_living, unified=_living)


def _living(workspace: Workspace) -> Outcome:
    """How many tensors more there are after forwards without a backward pass."""
    model = workspace.load().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = workspace.inputs(text_only=True)
    first, second = (_after_a_forward(model, batch) for _ in range(2))
    return Outcome(second > first, f"a forward without a backward pass leaves {second - first} tensors", 0.0)


def _after_a_forward(model: Any, batch: dict[str, Any]) -> int:
    import torch

    model(**batch, labels=batch["input_ids"], use_cache=False)
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
