"""CorDA, LoRA-GA, KaSA and LoftQ read and change the base weights of a split model as on one device.

Symptom: ``AttributeError: 'NoneType' object has no attribute 'detach'`` from ``preprocess_loraga`` on a split
base model, and ``RuntimeError: Tensor on device meta is not on the expected device cpu!`` from
``preprocess_corda``. ``replace_lora_weights_loftq`` cannot read such a layer. A cache file of the first two is
loaded onto meta. Silent: an adapter with KaSA, loaded with ``low_cpu_mem_usage=True``, truncates the base weights
in its first forward only.

Cause: Between two forwards an offloaded weight is on meta. CorDA and LoftQ read it there. LoRA-GA reads its gradient
there, which the weight of the forward has. What KaSA's first forward changes leaves with the weight of that forward.

Fix: Each weight that CorDA and LoftQ read is onloaded meanwhile. The weights that LoRA-GA asks for gradients stay on
their device until it has them: it holds as many bytes in gradients there. What KaSA truncates is stored. The
initialization itself is that of ``peft-keep-dispatch``.

Remove when: PEFT onloads what these initializations read, and accelerate keeps what a forward changes.
"""

import contextlib
import contextvars
import importlib.util
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._offload.weights import stored_weights
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F133",
    severity="crash",
    affected=">=0.18.0",
    acts_on="every model",
    requires="accelerate",
    needs="peft-keep-dispatch",
)

#: The model whose adapter weights LoftQ replaces.
_replacing: contextvars.ContextVar[Any] = contextvars.ContextVar("replacing", default=None)


@PATCH.replaces("peft.tuners.lora.corda", "collect_eigens_for_layer", group="corda")
def collect_eigens_for_layer(original: Original, linear: Any, *args: Any, **kwargs: Any) -> Any:
    with module_hooks.weights_brought_in(linear):
        return original(linear, *args, **kwargs)


@PATCH.replaces("peft.tuners.lora.corda", "get_model_device", group="corda")
@PATCH.replaces("peft.tuners.lora.loraga", "get_model_device", group="lora_ga")
def get_model_device(original: Original, model: Any) -> Any:
    found = original(model)
    if str(found) != "meta":
        return found
    devices = (module_hooks.execution_device(module) for module in model.modules())
    return next((device.type if found == "meta" else device for device in devices if device is not None), found)


@PATCH.replaces("peft.tuners.lora.loraga", "estimate_gradients", group="lora_ga")
def estimate_gradients(
    original: Original, model: Any, lora_config: Any, train_step: Any, *args: Any, **kwargs: Any
) -> Any:
    from peft.tuners.lora import loraga

    with contextlib.ExitStack() as stack:
        for _, module in loraga.get_target_modules(model, lora_config):
            stack.enter_context(module_hooks.weights_brought_in(module))
        return original(model, lora_config, train_step, *args, **kwargs)


@PATCH.replaces("peft.utils.loftq_utils", "replace_lora_weights_loftq", group="loftq")
def replace_lora_weights_loftq(original: Original, peft_model: Any, *args: Any, **kwargs: Any) -> Any:
    with in_place.bound(_replacing, peft_model):
        return original(peft_model, *args, **kwargs)


@PATCH.replaces("peft.utils.loftq_utils", "_loftq_init_new", group="loftq")
def loftq_init(original: Original, qweight: Any, *args: Any, **kwargs: Any) -> Any:
    model = _replacing.get()
    if model is None or not qweight.is_meta:
        return original(qweight, *args, **kwargs)
    layer = next(module for module in walk.modules(model) if module._parameters.get("weight") is qweight)
    with module_hooks.weights_brought_in(layer):
        return original(layer.weight, *args, **kwargs)


@PATCH.replaces(
    "peft.tuners.lora.variants", "KasaLinearVariant._truncate_base_weight", affected=">=0.21.0", group="kasa"
)
def truncate_base_weight(original: Original, module: Any, *args: Any, **kwargs: Any) -> Any:
    dropped = original(module, *args, **kwargs)
    base = module.get_base_layer()
    if module_hooks.offload_hook(base) is not None:  # in a forward, which ends with this weight and takes it out
        weight = base._parameters["weight"]
        stored_weights.write(base, "weight", weight)
        base._parameters["weight"] = weight
    return dropped


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._lab import tiny_adapters

    options, prepare = _first_here()
    if prepare is None:
        return Outcome(False, "this PEFT has no LoRA-GA, and its CorDA lacks the package attrs", applicable=False)

    def adapted(model: Any) -> Any:
        config = LoraConfig(r=2, target_modules=tiny_adapters.SOME_LINEARS, **options)
        batch = workspace.inputs(text_only=True)
        torch.manual_seed(0)

        def run() -> None:
            loss = model(**batch, labels=batch["input_ids"]).loss
            if torch.is_grad_enabled():  # CorDA reads only inputs
                loss.backward()

        prepare(model, config, run)
        model.zero_grad()
        return workspace.outputs(get_peft_model(model, config).eval(), text_only=True)

    model = workspace.load_unmarked()
    found = workspace.difference(adapted(workspace.load()), adapted(workspace.dispatch(model, "layers")))
    return Outcome.of_parity(found, f"{options['init_lora_weights']} on a base with offloaded layers")


def _first_here() -> tuple[dict[str, Any], Callable[..., None] | None]:
    """The options of LoRA-GA, or of CorDA where PEFT has no LoRA-GA, and what prepares a model for it."""
    from peft.tuners.lora import config

    if hasattr(config, "LoraGAConfig"):
        from peft.tuners.lora.loraga import preprocess_loraga

        return {"init_lora_weights": "lora_ga", "lora_ga_config": config.LoraGAConfig()}, preprocess_loraga
    if importlib.util.find_spec("attr") is None:
        return {}, None
    from peft.tuners.lora.corda import preprocess_corda

    given = config.CordaConfig(corda_method="ipm")
    return {"init_lora_weights": "corda", "corda_config": given}, preprocess_corda
