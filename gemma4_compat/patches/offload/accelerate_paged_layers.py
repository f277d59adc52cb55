"""Offloaded layers run faster: each is prefetched in one pinned copy while the layer before it computes.

Symptom: silent: layers that a device map puts on the CPU decode slowly. Putting 8 of E4B's 42 layers there costs
three quarters of the speed.

Cause: ``AlignDevicesHook.pre_forward`` onloads each tensor of each module separately when the module is called: one
hook, one constructor and one copy from pageable memory for each. This takes about 1 ms of host work per module,
and the GPU waits meanwhile.

Fix: The offloaded layers of a Gemma 4 model are streamed: each layer is one copy from pinned memory, prefetched
while the layer before it computes. The outputs are bit-identical. Other offloaded modules are not streamed, and
neither are layers that compute on several devices or have offloaded buffers or tied weights.

Experts of an offloaded layer, or experts offloaded by themselves, are not streamed in a step of few tokens without
gradients, such as a decoding step. They are looked up in pinned host memory: only the experts that the tokens are
routed to are read, with the same outputs. The rest of the layer is streamed.

Several threads may call such a model: a forward, or a backward pass, waits for that of another thread, and
``generate`` takes turns with it token by token. A model without offloaded parts has no such lock. The layers that a
graph of gradients (``create_graph=True``) goes through stay on the device as long as the graph lives.

If torch lacks one of the private interfaces that this needs, the layers stay with accelerate: the same outputs,
slower, for one thread at a time. One warning says so.

During a forward, hooks that have nothing to do on the layers that stay on the accelerator are also bypassed.

Remove when: accelerate moves an offloaded block in one piece, ahead of the computation.
"""

from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import family
from gemma4_compat._offload import model_lock, torch_internals
from gemma4_compat._offload.transfer import idle_hooks, streaming
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F31 F45 F46 F53",
    kind="speed",
    severity="speed",
    affected=">=1.12",
    after="accelerate-skip-keys accelerate-nested-map accelerate-offload-folder accelerate-move-offloaded",
    needs="bitsandbytes-meta-quant-state",
)


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    dispatched = original(model, *args, **kwargs)
    if family.has_parts(dispatched):
        absent = torch_internals.missing()
        lock = model_lock.ModelLock()
        if not absent:
            streaming.install(dispatched, lock)
        idle_hooks.install(dispatched)
        if not absent:
            model_lock.install(dispatched, lock, streamed=streaming.is_streamed)
        elif any(module_hooks.offload_hook(module) for module in dispatched.modules()):
            torch_internals.warn(absent)
    return dispatched


def reproduce(workspace: Workspace) -> Outcome:
    found = []
    for quantization in (None, "4bit-double"):
        model = workspace.load_unmarked(quantization)
        model = workspace.dispatch(model)
        found.append(workspace.difference(workspace.reference(quantization), model))
        layer = model.model.language_model.layers[0]
        missing: list[str] = []

        def look(*_: Any, layer: Any = layer, missing: list[str] = missing) -> None:
            missing += [name for name, weight in layer.named_parameters() if weight.is_meta]

        handle = layer.mlp.down_proj.register_forward_hook(look)
        model(**workspace.inputs(text_only=True))
        handle.remove()
        if missing:
            return Outcome(
                True,
                f"in the middle of an offloaded layer {len(missing)} of its weights are not there yet, "
                "or not any more: accelerate copies each by itself",
            )
    return Outcome.of_parity(max(found), "offloaded layers, bf16 and 4-bit")
