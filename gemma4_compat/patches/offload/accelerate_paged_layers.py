"""silent: layers that a device map puts on the CPU decode slowly. 8 of E4B's 42 layers there cost three quarters of
the speed.

Why: accelerate brings each tensor of each module in by itself when the module is called: one hook, one constructor and
one copy out of pageable memory for each, about 1 ms of host work a module, and the GPU waits meanwhile.

Here: the offloaded layers of a Gemma 4 model are paged: one layer is one copy out
of pinned memory, made while the layer before it computes. The answers are the same bits. What a map offloads beside
layers is left as it is. And hooks that have nothing to do, on the layers that stay on the accelerator, are out of the
way during a forward.

Goes when accelerate moves an offloaded block as one, ahead of the computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import family
from gemma4_compat._offload import idle_hooks, streaming

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def dispatch_model(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    dispatched = original(model, *args, **kwargs)
    if family.is_gemma4(dispatched):
        streaming.install(dispatched)
        idle_hooks.install(dispatched)
    return dispatched


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction.workspace import difference

    found = []
    for quantization in (None, "4bit-double"):
        reference, model = workspace.load(quantization), workspace.load(quantization)
        for parameter in model.parameters():
            vars(parameter).pop("_is_hf_initialized", None)  # on older releases its crash, F1, would come first
        model = workspace.dispatch(model)
        found.append(difference(workspace.answers(reference), workspace.answers(model)))
        layer = model.model.language_model.layers[0]
        missing: list[str] = []

        def look(*_: Any, layer: Any = layer, missing: list[str] = missing) -> None:
            missing += [name for name, weight in layer.named_parameters() if weight.device.type == "meta"]

        handle = layer.mlp.down_proj.register_forward_hook(look)
        model(**workspace.inputs(text_only=True))
        handle.remove()
        if missing:
            return Outcome(
                True,
                f"in the middle of an offloaded layer {len(missing)} of its weights are not there yet, "
                "or not any more: each travels by itself",
            )
    return Outcome.of_parity(max(found), "offloaded layers, bf16 and 4-bit")


PATCH = Patch(
    id="accelerate-paged-layers",
    summary="the offloaded layers of a model are paged: one pinned copy a layer, while the one before it computes",
    symptom="silent: 8 of 42 layers on the CPU cost three quarters of the speed",
    severity=Severity.SPEED,
    failure_points=("F31",),
    distribution="accelerate",
    affected=">=1.12",
    measured="1.15.0",
    after=("accelerate-skip-keys", "accelerate-nested-map", "accelerate-offload-folder", "accelerate-move-offloaded"),
    retire_when="accelerate moves an offloaded block as one, ahead of the computation",
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
