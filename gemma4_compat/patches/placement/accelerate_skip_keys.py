"""``dispatch_model`` does not move arguments that the model itself says must not be moved.

Symptom: ``KeyError: 13`` (a layer's index, or ``'sliding_attention'``) in the attention of a layer that shares the
keys and values of another layer, once modules are on two devices.

Cause: The text model passes one mapping, ``shared_kv_states``, from layer to layer: some layers write to it, later
ones read it. accelerate's hooks rebuild every mapping among a forward's arguments to move its contents, except those
that ``skip_keys`` names. By default ``dispatch_model`` names none, so each layer writes to its own copy. transformers
passes the model's own list when it loads; PEFT and most users do not. The container of transformers 5.23 survives the
hooks.

Fix: ``dispatch_model`` of a Gemma 4 without ``skip_keys`` takes the model's own list
(``_skip_keys_device_placement``), through PEFT and any other wrapper. Keys that the caller names are used as given.

Remove when: ``dispatch_model`` takes the model's own list by default, or the oldest supported transformers is 5.23.
"""

import inspect
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F5", severity="crash", affected=">=1.12", requires="transformers>=5.5.3,<5.23")


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    if call.arguments.get("skip_keys") is None and (keys := _own_skip_keys(call.arguments["model"])):
        call.arguments["skip_keys"] = keys
    return original(*call.args, **call.kwargs)


def _own_skip_keys(model: Any) -> list[str]:
    """The list of the outermost module that has one: the model's, inside any wrappers. Only for a Gemma 4."""
    for module in model.modules():
        keys = getattr(type(module), "_skip_keys_device_placement", None)
        if keys:
            found = [keys] if isinstance(keys, str) else list(keys)
            return found if family.has_parts(module) else []
    return []


def reproduce(workspace: Workspace) -> Outcome:
    from accelerate import dispatch_model

    reference = workspace.reference()
    model = workspace.load()
    dispatch_model(model, workspace.device_map(model), offload_dir=workspace.new_folder())
    try:
        outputs = workspace.outputs(model)
    except KeyError as error:
        if not versions.admits("<5.5.3", versions.current("transformers") or ""):
            raise
        # 5.5.2: see transformers-shared-kv.
        return Outcome(False, f"KeyError: {error}; the model's own list lacks shared_kv_states", applicable=False)
    return Outcome.of_parity(workspace.difference(reference, outputs), "dispatch_model without skip_keys")
