"""``RuntimeError: Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same``

Or ``expected m1 and m2 to have the same dtype``: from the first forward with IA3, RandLoRA, RoAd, PVeRA or VeRA on a
quantized base, and with AdaLoRA on an 8-bit one. ``mat1 and mat2 shapes cannot be multiplied (36x64 and 32x64)``,
``shape '[64, 32]' is invalid for input of size 4096``, ``linalg.vector_norm: Expected a floating point or complex
tensor as input. Got Byte``: with LoHa, LoKr, HRA, DeLoRA, BOFT (before PEFT 0.20) and ``orthogonal`` or ``pissa``
initialization. Silent: HRA on an 8-bit base makes another model.

``only Tensors of floating point dtype can require gradients``: with ``modules_to_save`` that is quantized; ``KeyError:
'base_model.model...weight.absmax'`` where such an adapter is loaded.

Why: the first group converts its input to float32 and answers in that dtype, where the bitsandbytes layer below
answers in the dtype it was asked in; the next unquantized layer, of which Gemma 4 has several in each block, has bf16
weights.
The second uses the base weight as it is stored, as packed bytes.

Here: the first group answers in the dtype of its input (outside of autocast). For the second, on Gemma 4 models, one
layer of each kind is asked, once it is made, whether it answers what the same layer over the unpacked weight answers.
If not, or if it cannot be made, that is one error that names the layer and what works instead, and the model is as it
was. So are copies of quantized modules.

Goes when PEFT's layers for bitsandbytes answer in the dtype of their input, and the others refuse quantized layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._adapters import rollback
from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import family, walk
from gemma4_compat._quantization.plain_layers import is_quantized, over_plain_weight, with_base

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

#: Of the answer's size: quantized kernels stay below a tenth of it.
_TOLERANCE = 0.5


def inject_adapter(
    original: Callable[..., Any], self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    if not family.is_gemma4(model) or not any(is_quantized(module) for module in walk.modules(model)):
        return original(self, model, adapter_name, *args, **kwargs)
    config = self.peft_config[adapter_name]
    _refuse_quantized_copies(config, model)
    create = self._create_and_replace

    def create_or_say_why_not(config: Any, name: str, target: Any, *rest: Any, **kw: Any) -> None:
        try:
            create(config, name, target, *rest, **kw)
        except (RuntimeError, TypeError) as error:
            if is_quantized(target.get_base_layer() if hasattr(target, "get_base_layer") else target):
                raise _refusal(config, kw.get("current_key"), " ".join(str(error).split())) from error
            raise

    with rollback.undone_if_it_fails(model, adapter_name):
        vars(self)["_create_and_replace"] = create_or_say_why_not
        try:
            result = original(self, model, adapter_name, *args, **kwargs)
        finally:
            vars(self).pop("_create_and_replace", None)
        _try_one_of_each_kind(config, model, adapter_name)
    return result


def _refuse_quantized_copies(config: Any, model: Any) -> None:
    """Raise for ``modules_to_save`` that reach quantized layers: packed weights cannot be trained."""
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    if not saved:
        return
    names = [
        name
        for name, module in walk.named_modules(model)
        if name.endswith(saved) and any(is_quantized(part) for part in module.modules())
    ]
    if names:
        skip = ", ".join(repr(name) for name in ["lm_head", *names[:3]]) + (", ..." if names[3:] else "")
        raise Gemma4CompatError(
            f"modules_to_save={sorted(saved)} asks for a trained copy of {names[0]!r}, whose weights are quantized: "
            "they cannot be trained. Nothing was changed. Keep it unquantized with "
            f"BitsAndBytesConfig(..., llm_int8_skip_modules=[{skip}]), or put an adapter on its linears with "
            "target_modules."
        )


def forward(original: Callable[..., Any], self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    result = original(self, x, *args, **kwargs)
    if result.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return result
    return result.to(x.dtype)


def _try_one_of_each_kind(config: Any, model: Any, adapter_name: str) -> None:
    tried: set[type] = set()
    for name, layer in walk.named_modules(model):
        if type(layer) in tried or not hasattr(type(layer), "get_base_layer"):
            continue
        base = layer.get_base_layer()
        if not is_quantized(base) or layer.base_layer is not base or adapter_name not in layer.active_adapters:
            continue
        if any(value.device.type == "meta" for value in [*layer.parameters(), *layer.buffers()]):
            continue  # offloaded, or made without memory: its values are not there yet
        tried.add(type(layer))
        reason = _difference(layer, model.dtype)
        if reason is not None:
            raise _refusal(config, name, reason)


def _difference(layer: Any, dtype: Any) -> str | None:
    """What is wrong with the answer of this layer, measured against itself over the unpacked weight; or None."""
    import torch

    base = layer.get_base_layer()
    x = torch.randn(4, base.in_features, generator=torch.Generator().manual_seed(0)).to(base.weight.device, dtype)
    layer = _settled(layer)
    modes = [(module, module.training) for module in base.modules()]
    layer.eval()
    base.train()  # in eval mode bitsandbytes may repack the weight for the CPU
    try:
        with torch.no_grad():
            try:
                found = type(layer).forward(layer, x)
            except (RuntimeError, TypeError) as error:
                return " ".join(str(error).split())
            twin = over_plain_weight(layer)
            twin.get_base_layer().to(dtype)
            try:
                wanted = type(twin).forward(twin, x)
            except (RuntimeError, TypeError):  # then it says nothing about the layer
                return None
    finally:
        for module, training in modes:
            module.training = training
    share = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return None if share < _TOLERANCE else f"its answer is wrong by {share:.1f} times its size"


def _settled(layer: Any) -> Any:
    """A copy over the same base, its adapter weights in float32 as PEFT makes them once all layers are there.

    Until then VeRA's are mixed before PEFT 0.19, and no layer answers, over whatever weight.
    """
    copied = with_base(layer, layer.base_layer)
    children = copied._modules
    for name, child in children.items():
        if name != "base_layer":
            children[name] = copy.deepcopy(child).float()
    return copied


def _refusal(config: Any, name: str | None, reason: str) -> Gemma4CompatError:
    tuner, init = config.peft_type.value, getattr(config, "init_lora_weights", True)
    kind = f"{tuner} adapters initialized with {init!r}" if isinstance(init, str) else f"{tuner} adapters"
    return Gemma4CompatError(
        f"{kind} do not work on quantized layers such as {name!r} in this release of PEFT: {reason}. Nothing was "
        "changed. Use LoRA (use_dora and use_rslora too), OFT or VeRA, target unquantized layers only, or load the "
        "base model without quantization_config."
    )


def reproduce(workspace: Workspace) -> Outcome:
    from peft import HRAConfig, IA3Config, LoHaConfig, RoadConfig, get_peft_model

    from gemma4_compat._errors import Gemma4CompatError
    from gemma4_compat._reproduction.workspace import difference

    works = (  # each leaves the model as it is until it is trained
        ("4bit", IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])),
        ("8bit", RoadConfig(group_size=32, target_modules=["q_proj", "up_proj"])),
    )
    found = []
    for quantization, config in works:
        reference = workspace.answers(workspace.load(quantization))
        model = get_peft_model(workspace.load(quantization), config)
        found.append(difference(reference, workspace.answers(model.eval())))
    cannot = (
        ("4bit", LoHaConfig(r=4, alpha=8, target_modules=["q_proj"])),
        ("8bit", HRAConfig(r=4, target_modules=["q_proj"])),
    )
    for quantization, config in cannot:
        base = workspace.load(quantization)
        reference = workspace.answers(base)
        try:
            workspace.answers(get_peft_model(base, config).eval())
        except Gemma4CompatError:
            found.append(difference(reference, workspace.answers(base)))
        else:
            return Outcome(True, f"{config.peft_type.value} on a {quantization} base answers something else")
    return Outcome.of_parity(
        max(found), "IA3 and RoAd on quantized bases, and the model after LoHa and HRA were refused"
    )


PATCH = Patch(
    id="peft-quantized-tuners",
    summary="IA3, RandLoRA, RoAd and VeRA run on quantized layers; adapters that cannot are refused",
    symptom="RuntimeError: Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same; "
    "mat1 and mat2 shapes cannot be multiplied; silent: other answers",
    severity=Severity.CRASH,
    failure_points=("F4",),
    distribution="peft",
    affected=">=0.18.0",
    measured="0.21.2",
    requires=("bitsandbytes", "transformers>=5.5"),
    after=("peft-keep-dispatch",),
    retire_when="layers for bitsandbytes answer in the dtype of their input, and other tuners refuse quantized layers",
    targets=(
        Target(
            module="peft.tuners.tuners_utils",
            name="BaseTuner.inject_adapter",
            replacement=inject_adapter,
            known={
                "68bd72181f68": "0.18.0 - 0.18.1",
                "4667223f092b": "0.19.0 - 0.20.0",
                "dab4e0770653": "0.21.0 - 0.21.2",
            },
        ),
        Target(
            module="peft.tuners.ia3.bnb",
            name="Linear8bitLt.forward",
            replacement=forward,
            known={
                "f4260ac09f4c": "0.18.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.ia3.bnb",
            name="Linear4bit.forward",
            replacement=forward,
            known={
                "ed53d55c2343": "0.18.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.randlora.bnb",
            name="Linear8bitLt.forward",
            replacement=forward,
            known={
                "42134b0bbc83": "0.18.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.randlora.bnb",
            name="Linear4bit.forward",
            replacement=forward,
            known={
                "096d257c1385": "0.18.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.road.bnb",
            name="Linear8bitLt.forward",
            replacement=forward,
            known={
                "f035bb07189c": "0.18.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.road.bnb",
            name="Linear4bit.forward",
            replacement=forward,
            known={
                "f035bb07189c": "0.18.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.adalora.bnb",
            name="SVDLinear8bitLt.forward",
            replacement=forward,
            known={
                "f98a218da388": "0.18.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.pvera.bnb",
            name="Linear8bitLt.forward",
            replacement=forward,
            known={
                "0e177757f91f": "0.19.0 - 0.19.1",
                "dd9ffcb38a5b": "0.20.0",
                "ba99bb37c25e": "0.21.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.pvera.bnb",
            name="Linear4bit.forward",
            replacement=forward,
            known={
                "e4e58f0619f7": "0.19.0 - 0.19.1",
                "132559dec11b": "0.20.0",
                "b23ca64d8072": "0.21.0 - 0.21.2",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.vera.bnb",
            name="Linear8bitLt.forward",
            replacement=forward,
            known={
                "21a8944291b9": "0.18.0 - 0.19.1",
            },
            optional=True,
        ),
        Target(
            module="peft.tuners.vera.bnb",
            name="Linear4bit.forward",
            replacement=forward,
            known={
                "f186f058ec69": "0.18.0 - 0.19.1",
            },
            optional=True,
        ),
    ),
    reproduce=reproduce,
)
