"""``KeyError: 13`` (or ``'sliding_attention'``) in the attention of a layer that shares another one's keys and values.

Why: the text model hands one mapping, ``shared_kv_states``, from layer to layer: some write to it, later ones read.
accelerate's hooks rebuild every mapping among a forward's arguments to move what is in it, except those that
``skip_keys`` names, and ``dispatch_model`` names none by itself: each layer writes to a copy of its own. transformers
passes the model's own list when it loads; PEFT, and most users, do not.

Here: a ``dispatch_model`` without ``skip_keys`` takes the model's own list, through PEFT and any other wrapper.

Goes when accelerate takes it by default, or transformers 5.23 is the oldest supported release: its container survives
the hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def dispatch_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    if call.arguments.get("skip_keys") is None and (keys := _own_skip_keys(call.arguments["model"])):
        call.arguments["skip_keys"] = keys
    return original(*call.args, **call.kwargs)


def _own_skip_keys(model: Any) -> list[str]:
    """The list of the outermost module that has one: the model's, inside whatever wraps it."""
    for module in model.modules():
        keys = getattr(type(module), "_skip_keys_device_placement", None)
        if keys:
            return [keys] if isinstance(keys, str) else list(keys)
    return []


def reproduce(workspace: Workspace) -> Outcome:
    import tempfile

    from accelerate import dispatch_model

    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.workspace import difference

    reference = workspace.outputs(workspace.load())
    model = workspace.load()
    placement = tiny.device_map(model, "both", main=workspace.main, offloaded=workspace.offloaded)
    dispatch_model(model, placement, offload_dir=tempfile.mkdtemp(dir=workspace.folder))
    try:
        outputs = workspace.outputs(model)
    except KeyError as error:
        if not versions.admits("<5.5.3", versions.current("transformers") or ""):
            raise
        # 5.5.2: see transformers-shared-kv.
        return Outcome(False, f"KeyError: {error}; the model's own list lacks shared_kv_states", applicable=False)
    return Outcome.of_parity(difference(reference, outputs), "dispatch_model without skip_keys")


PATCH = Patch(
    id="accelerate-skip-keys",
    summary="dispatch_model leaves alone the arguments that the model itself says must not be moved",
    symptom="KeyError: 13 (a layer's index, or 'sliding_attention') in attention once modules sit on two devices",
    severity=Severity.CRASH,
    failure_points=("F5",),
    distribution="accelerate",
    affected=">=1.12",
    measured="1.15.0",
    requires=("transformers>=5.5.3,<5.23",),
    retire_when="dispatch_model takes the model's own list by default, or the oldest supported transformers is 5.23",
    targets=(
        Target(
            module="accelerate.big_modeling",
            name="dispatch_model",
            replacement=dispatch_model,
            known={"ce5fa56a90e1": "1.12.0", "a6f9d638158e": "1.13.0 - 1.14.0", "e7b75432dc18": "1.15.0"},
        ),
    ),
    reproduce=reproduce,
)
