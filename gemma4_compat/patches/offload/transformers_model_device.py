"""``model.device`` is the device where the model takes its inputs, with or without offloaded modules.

Symptom: ``RuntimeError: Tensor.item() cannot be called on meta tensors`` from ``generate``, and ``NotImplementedError:
Cannot copy out of meta tensor`` from a forward, for a batch that was moved ``.to(model.device)``: the line of every
model card. Evaluation harnesses and chat front ends do the same, and PEFT puts prompt encoders there.

Cause: ``model.device`` is the device of the first parameter. It belongs to the vision tower of a multimodal model (to
``embed_tokens`` before transformers 5.6) and to ``embed_tokens`` of a text model. Between two forwards an offloaded
parameter is on meta.

Fix: While the first parameter is on meta and a hook of accelerate onloads it, ``model.device`` is where the input
embedding computes (``gemma4_compat.input_device``); for a part without one, such as a tower, it is where its first
parameter computes. PEFT's wrappers ask the model inside. Any other model answers as before, with the device of its
first parameter, even if that really is meta. ``generate`` still does not compile a model whose first parameter is
offloaded.

Remove when: ``ModuleUtilsMixin.device`` of transformers takes accelerate's hooks into account.
"""

from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.accelerate import hooked
from gemma4_compat._gemma4.models import inspection
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F37",
    severity="crash",
    affected=">=5.5",
    acts_on="every model",
    requires="accelerate",
    needs="transformers-offloaded-embedding",
)
PATCH.replaces(**hooked.ADD_HOOK, group="model.device")(hooked.activator(PATCH.id))


@PATCH.replaces(
    "transformers.modeling_utils", "ModuleUtilsMixin.device", dormant=hooked.no_hooks, group="model.device"
)
def device(original: Original, self: Any) -> Any:
    found = original(self)
    if found.type != "meta":
        return found
    return inspection.device_of_offloaded(self) or found


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._valid_auto_compile_criteria", group="compilation")
def valid_auto_compile_criteria(
    original: Callable[..., bool], self: Any, model_kwargs: Any, generation_config: Any, *args: Any, **kwargs: Any
) -> bool:
    found = original(self, model_kwargs, generation_config, *args, **kwargs)
    compilation = generation_config.compile_config
    if not found or (compilation is not None and compilation._compile_all_devices):
        return found
    # Hooks crash in a compiled forward. Without a device map (`accelerate.cpu_offload`), meta prevented compiling.
    return bool(next(self.parameters()).device.type != "meta")


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    model = workspace.load()
    # Their order differs between releases.
    model = workspace.dispatch(model, "towers", "model.language_model.embed_tokens", "lm_head")
    batch = {name: value.to(model.device) for name, value in workspace.inputs().items()}
    expected = workspace.reference()
    with torch.no_grad():
        model.generate(**batch, max_new_tokens=2, do_sample=False)
    return Outcome.of_parity(workspace.difference(expected, model), f"inputs moved to {model.device}")
