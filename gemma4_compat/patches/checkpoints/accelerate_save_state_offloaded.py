"""``Accelerator.save_state`` saves a model with offloaded modules, and ``load_state`` resumes it.

Symptom: ``NotImplementedError: Cannot copy out of meta tensor; no data!`` from ``Accelerator.save_state`` of a model
with offloaded modules, after ``Removed shared tensor`` with the name of each offloaded weight; no file is written.
With ``safe_serialization=False`` offloaded weights are in the file without their values, as in the result of
``Accelerator.get_state_dict``.

Cause: ``get_state_dict`` is ``model.state_dict()``, in which offloaded weights are on meta. safetensors takes them for
one shared tensor, and reads them. When it loads, it looks in the model's state dict for tied weights, which it cannot
recognize on meta.

Fix: ``get_state_dict`` returns the stored values, as tensors over host memory or over the files, not copies. The files
are those of the same model on one device, and either can resume from the other's. The scales of 4-bit weights
are loaded by ``transformers-load-4bit-state``.

Remove when: ``Accelerator.get_state_dict`` reads offloaded weights through accelerate's hooks.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.models import family
from gemma4_compat._offload.weights import state_loading
from gemma4_compat.patches.api import FORWARDS, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F95",
    severity="crash",
    affected=">=1.12",
    requires="peft",
    needs="accelerate-load-offloaded transformers-load-4bit-state",
)


@PATCH.replaces("accelerate.accelerator", "Accelerator.get_state_dict")
def get_state_dict(original: Original, self: Any, model: Any, unwrap: bool = True) -> Any:
    found = original(self, model, unwrap)
    if found and family.has_parts(model):
        state_loading.fill(self.unwrap_model(model) if unwrap else model, found)
    return found


@PATCH.replaces("accelerate.checkpointing", "load_accelerator_state")
def load_accelerator_state(original: Original, input_dir: Any, models: list[Any], *args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for model in models:
            if family.has_parts(model):
                stack.enter_context(_loadable(model))
        return original(input_dir, models, *args, **kwargs)


@contextlib.contextmanager
def _loadable(model: Any) -> Iterator[None]:
    """Inside, the model's state dict has all values."""

    def state_dict(below: Any, *args: Any, **kwargs: Any) -> Any:
        found = below(*args, **kwargs)
        state_loading.fill(model, found)
        return found

    with in_place.replaced(model, "state_dict", state_dict):
        yield


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._lab import tiny_adapters

    batch = workspace.inputs(text_only=True)

    def prepared() -> Any:
        torch.manual_seed(0)
        model = workspace.load_unmarked()
        model = get_peft_model(workspace.dispatch(model), LoraConfig(target_modules=tiny_adapters.SOME_LINEARS))
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], 0.1)
        accelerator = Accelerator(cpu=workspace.main == "cpu")
        return accelerator, *accelerator.prepare(model, optimizer)

    def losses(accelerator: Any, model: Any, optimizer: Any) -> list[float]:
        found = []
        for _ in range(FORWARDS):
            loss = model(**batch, labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    folder = workspace.new_folder()
    run = prepared()
    losses(*run)
    run[0].save_state(folder)
    right = losses(*run)
    AcceleratorState._reset_state(reset_partial_state=True)
    run = prepared()
    run[0].load_state(folder)
    worst = max(abs(a - b) for a, b in zip(right, losses(*run), strict=True))
    return Outcome(worst > 0, f"losses of {FORWARDS} steps after load_state differ by {worst:.3g}", worst)
