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

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._accelerate import module_hooks
from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target
from gemma4_compat._models import walk
from gemma4_compat._offload import stored_weights

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

#: The model whose adapter weights LoftQ replaces.
_replacing: contextvars.ContextVar[Any] = contextvars.ContextVar("replacing", default=None)


def collect_eigens_for_layer(original: Callable[..., Any], linear: Any, *args: Any, **kwargs: Any) -> Any:
    with module_hooks.weights_brought_in(linear):
        return original(linear, *args, **kwargs)


def get_model_device(original: Callable[..., Any], model: Any) -> Any:
    found = original(model)
    if str(found) != "meta":
        return found
    devices = (module_hooks.execution_device(module) for module in model.modules())
    return next((device.type if found == "meta" else device for device in devices if device is not None), found)


def estimate_gradients(
    original: Callable[..., Any], model: Any, lora_config: Any, train_step: Any, *args: Any, **kwargs: Any
) -> Any:
    from peft.tuners.lora import loraga

    with contextlib.ExitStack() as stack:
        for _, module in loraga.get_target_modules(model, lora_config):
            stack.enter_context(module_hooks.weights_brought_in(module))
        return original(model, lora_config, train_step, *args, **kwargs)


def replace_lora_weights_loftq(original: Callable[..., Any], peft_model: Any, *args: Any, **kwargs: Any) -> Any:
    token = _replacing.set(peft_model)
    try:
        return original(peft_model, *args, **kwargs)
    finally:
        _replacing.reset(token)


def loftq_init(original: Callable[..., Any], qweight: Any, *args: Any, **kwargs: Any) -> Any:
    model = _replacing.get()
    if model is None or not qweight.is_meta:
        return original(qweight, *args, **kwargs)
    layer = next(module for module in walk.modules(model) if module._parameters.get("weight") is qweight)
    with module_hooks.weights_brought_in(layer):
        return original(layer.weight, *args, **kwargs)


def truncate_base_weight(original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
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

    from gemma4_compat._reproduction import tiny_adapters
    from gemma4_compat._reproduction.workspace import difference

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

    model = workspace.load()
    for parameter in model.parameters():
        vars(parameter).pop("_is_hf_initialized", None)  # on older releases its crash, F1, would come first
    found = difference(adapted(workspace.load()), adapted(workspace.dispatch(model, "layers")))
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


_CORDA, _LORA_GA = "peft.tuners.lora.corda", "peft.tuners.lora.loraga"
_LOFTQ = "peft.utils.loftq_utils"

PATCH = Patch(
    id="peft-offloaded-inits",
    kind=Kind.REPAIR,
    severity=Severity.CRASH,
    failure_points=("F133",),
    distribution="peft",
    affected=">=0.18.0",
    acts_on=ActsOn.EVERY_MODEL,
    requires=("accelerate",),
    needs=("peft-keep-dispatch",),
    targets=(
        Target(module=_CORDA, name="collect_eigens_for_layer", replacement=collect_eigens_for_layer, group="corda"),
        Target(module=_CORDA, name="get_model_device", replacement=get_model_device, group="corda"),
        Target(module=_LORA_GA, name="estimate_gradients", replacement=estimate_gradients, group="lora_ga"),
        Target(module=_LORA_GA, name="get_model_device", replacement=get_model_device, group="lora_ga"),
        Target(
            module=_LOFTQ, name="replace_lora_weights_loftq", replacement=replace_lora_weights_loftq, group="loftq"
        ),
        Target(module=_LOFTQ, name="_loftq_init_new", replacement=loftq_init, group="loftq"),
        Target(
            module="peft.tuners.lora.variants",
            name="KasaLinearVariant._truncate_base_weight",
            replacement=truncate_base_weight,
            affected=">=0.21.0",
            group="kasa",
        ),
    ),
    reproduce=reproduce,
)
