"""IA3, RandLoRA, RoAd, PVeRA and VeRA run on quantized layers; tuners that cannot are refused.

Symptom: ``RuntimeError: Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same`` or
``expected m1 and m2 to have the same dtype``, from the first forward with IA3, RandLoRA, RoAd, PVeRA or VeRA on a
quantized base, and with AdaLoRA on an 8-bit one.

With LoHa, LoKr, HRA, DeLoRA, BOFT (before PEFT 0.20) and ``orthogonal`` or ``pissa`` initialization: ``mat1 and mat2
shapes cannot be multiplied (36x64 and 32x64)``, ``shape '[64, 32]' is invalid for input of size 4096`` or
``linalg.vector_norm: Expected a floating point or complex tensor as input. Got Byte``. HRA on an 8-bit base raises
nothing and gives different outputs.

With ``modules_to_save`` on quantized modules: ``only Tensors of floating point dtype can require gradients``, and
``KeyError: 'base_model.model...weight.absmax'`` when such an adapter is loaded.

With any adapter on layers of compressed-tensors that do not stay packed (``transformers-packed-layers``):
``AttributeError: 'Linear' object has no attribute 'weight'``. With
DoRA and other tuners on layers of quanto: ``ValueError: The dtype of a weights Tensor cannot be changed``.

Cause: The bitsandbytes layers of the first group convert their input to float32 and return that dtype, while the
bitsandbytes layer below returns the dtype of its input. The next unquantized layer has bfloat16 weights, and each
Gemma 4 block has several of those. The second group uses the base weight as stored, as packed bytes. quanto's weights
cannot change their dtype, which such tuners request.

Fix: Layers of the first group return the dtype of their input (outside autocast). For the second group, on Gemma 4
models, the patch runs one layer of each kind once it is created, and compares it with the same layer over the unpacked
weight. If the outputs differ, or if the layer cannot be created, one error names the layer and what works instead, and
the model stays as it was. Trained copies of quantized modules, and adapters on layers that compressed-tensors is going
to decompress, are refused the same way.

Remove when: PEFT's layers for bitsandbytes return the dtype of their input, and the other tuners refuse quantized
layers.
"""

import copy
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import fitting, rollback
from gemma4_compat._gemma4.models import family, walk
from gemma4_compat._gemma4.quantization.other_quantizers import (
    DEQUANTIZE,
    dequantized,
    is_compressed,
    is_packed,
    is_quanto,
)
from gemma4_compat._gemma4.quantization.plain_layers import is_quantized, over_plain_weight, shallow_copy, with_base
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F4 F66",
    severity="crash",
    affected=">=0.18.0",
    acts_on="every model",
    requires="bitsandbytes transformers>=5.5",
    after="peft-keep-dispatch",
)

#: Relative to the output's norm; quantized kernels stay below 0.1.
_TOLERANCE = 0.5


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")
def inject_adapter(original: Original, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    if family.has_parts(model) and any(is_compressed(module) for module in walk.modules(model)):
        with rollback.undone_if_it_fails(model, adapter_name):
            try:
                return original(self, model, adapter_name, *args, **kwargs)
            except AttributeError as error:
                if "has no attribute 'weight'" not in str(error):
                    raise
                raise _compressed_refusal(model, error) from error
    if not family.has_parts(model) or not any(_keeps_packed(module) for module in walk.modules(model)):
        return original(self, model, adapter_name, *args, **kwargs)
    config = self.peft_config[adapter_name]
    _refuse_quantized_copies(config, model)

    def create_or_refuse(create: Any, config: Any, name: str, target: Any, *rest: Any, **kw: Any) -> None:
        try:
            create(config, name, target, *rest, **kw)
        except (RuntimeError, TypeError, ValueError) as error:
            base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
            if is_quanto(base) or (_keeps_packed(base) and not isinstance(error, ValueError)):
                raise _refusal(config, kw.get("current_key"), base, " ".join(str(error).split())) from error
            raise

    with rollback.undone_if_it_fails(model, adapter_name):
        with in_place.replaced(self, "_create_and_replace", create_or_refuse):
            result = original(self, model, adapter_name, *args, **kwargs)
        _try_one_of_each_kind(config, model, adapter_name)
    return result


def _keeps_packed(module: Any) -> bool:
    return is_quantized(module) or _library(module) is not None


def _library(module: Any) -> str | None:
    """Whose layer this is, if its packed weight is not one of bitsandbytes."""
    return "compressed-tensors" if is_packed(module) else "quanto" if is_quanto(module) else None


def _compressed_refusal(model: Any, error: AttributeError) -> Gemma4CompatError:
    """The message if PEFT finds no weight to put an adapter beside."""
    from gemma4_compat._gemma4.quantization import packed_linear

    remedy = packed_linear.remedy(model)
    return Gemma4CompatError(
        "the adapter targets layers of compressed-tensors, which have no weight before the first forward: "
        f"{error}. Nothing was changed. {remedy[0].upper()}{remedy[1:]}"
    )


def _refuse_quantized_copies(config: Any, model: Any) -> None:
    """Raise for ``modules_to_save`` that reach quantized layers: packed weights cannot be trained."""
    saved = tuple(getattr(config, "modules_to_save", None) or ())
    if not saved:
        return
    packed = {
        name: any(is_packed(part) for part in module.modules())
        for name, module in walk.named_modules(model)
        if name.endswith(saved) and any(is_quantized(part) or is_packed(part) for part in module.modules())
    }
    if names := list(packed):
        skip = ", ".join(repr(name) for name in ["lm_head", *names[:3]]) + (", ..." if names[3:] else "")
        remedy = f"Keep it unquantized with BitsAndBytesConfig(..., llm_int8_skip_modules=[{skip}])"
        if packed[names[0]]:
            remedy = f"For a model that can be trained, {DEQUANTIZE}"
        raise Gemma4CompatError(
            f"modules_to_save={sorted(saved)} asks for a trained copy of {names[0]!r}, whose weights are quantized: "
            f"they cannot be trained. Nothing was changed. {remedy}, or put an adapter on its linears with "
            "target_modules."
        )


@PATCH.replaces("peft.tuners.ia3.bnb", "Linear8bitLt.forward", optional=True)
@PATCH.replaces("peft.tuners.ia3.bnb", "Linear4bit.forward", optional=True)
@PATCH.replaces("peft.tuners.randlora.bnb", "Linear8bitLt.forward", optional=True)
@PATCH.replaces("peft.tuners.randlora.bnb", "Linear4bit.forward", optional=True)
@PATCH.replaces("peft.tuners.road.bnb", "Linear8bitLt.forward", optional=True)
@PATCH.replaces("peft.tuners.road.bnb", "Linear4bit.forward", optional=True)
@PATCH.replaces("peft.tuners.adalora.bnb", "SVDLinear8bitLt.forward", optional=True)
@PATCH.replaces("peft.tuners.pvera.bnb", "Linear8bitLt.forward", optional=True)
@PATCH.replaces("peft.tuners.pvera.bnb", "Linear4bit.forward", optional=True)
@PATCH.replaces("peft.tuners.vera.bnb", "Linear8bitLt.forward", optional=True)
@PATCH.replaces("peft.tuners.vera.bnb", "Linear4bit.forward", optional=True)
def forward(original: Original, self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    result = original(self, x, *args, **kwargs)
    if result.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return result
    return result.to(x.dtype)


def _try_one_of_each_kind(config: Any, model: Any, adapter_name: str) -> None:
    tried: set[type] = set()
    adapter = fitting.being_loaded()
    for name, layer in walk.named_modules(model):
        if type(layer) in tried or not hasattr(type(layer), "get_base_layer"):
            continue
        base = layer.get_base_layer()
        if not _keeps_packed(base) or layer.base_layer is not base or adapter_name not in layer.active_adapters:
            continue
        if any(value.device.type == "meta" for value in [*layer.parameters(), *layer.buffers()]):
            continue  # offloaded, or created on meta: it has no values yet
        tried.add(type(layer))
        for created in adapter.created if adapter is not None else ():
            created.zero(walk.modules(layer))
        reason = _difference(layer, model.dtype)
        if reason is not None:
            raise _refusal(config, name, base, reason)


def _difference(layer: Any, dtype: Any) -> str | None:
    """Why this layer's output is wrong, compared with the same layer over the dequantized weight, or None."""
    import torch

    layer = _settled(layer)
    base = layer.get_base_layer()
    x = torch.randn(4, base.in_features, generator=torch.Generator().manual_seed(0)).to(base.weight.device, dtype)
    layer.eval()
    base.train()  # in eval mode bitsandbytes may repack the weight for the CPU
    with torch.no_grad():
        try:
            with torch.set_grad_enabled(is_quanto(base)):  # AdaLoRA changes its output, which has gradients
                found = type(layer).forward(layer, x).detach()
        except (RuntimeError, TypeError, ValueError) as error:
            return " ".join(str(error).split())
        except KeyError:  # its tuner completes it once all layers exist, as UniLora does
            return None
        copied = over_plain_weight(layer, dequantized(base) if _library(base) else None)
        copied.get_base_layer().to(dtype)
        try:
            wanted = type(copied).forward(copied, x)
        except (RuntimeError, TypeError):  # then the comparison says nothing about the layer
            return None
    share = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return None if share < _TOLERANCE else f"its output is wrong by {share:.1f} times its size"


def _settled(layer: Any) -> Any:
    """A copy over a copy of the base, its adapter weights in float32 as PEFT makes them once all layers exist.

    Before PEFT 0.19, VeRA's weights have mixed dtypes until then, and no layer runs over any weight. The base is
    copied because bitsandbytes records the dtype of an input: in the layer and, before 0.50, in the weight's state.
    """
    base = layer.base_layer
    copied = with_base(layer, copy.copy(base) if _library(base) else shallow_copy(base))
    children = copied._modules
    for name, child in children.items():
        if name != "base_layer":
            children[name] = copy.deepcopy(child).float()
    return copied


def _refusal(config: Any, name: str | None, base: Any, reason: str) -> Gemma4CompatError:
    tuner, init = config.peft_type.value, getattr(config, "init_lora_weights", True)
    library, with_dora = _library(base), bool(getattr(config, "use_dora", False))
    kind = f"{tuner} adapters initialized with {init!r}" if isinstance(init, str) else f"{tuner} adapters"
    kind += " with use_dora" if with_dora else ""
    where = f"layers of {library}" if library else "quantized layers"
    also = "use_rslora too" if library == "quanto" else "use_dora and use_rslora too"
    return Gemma4CompatError(
        f"{kind} do not work on {where} such as {name!r} in this release of PEFT: {reason}. Nothing was "
        f"changed. Use LoRA ({also}), OFT or VeRA, target unquantized layers only, or load the base model without "
        "quantization_config."
    )


def reproduce(workspace: Workspace) -> Outcome:
    from peft import HRAConfig, IA3Config, LoHaConfig, RoadConfig, get_peft_model

    from gemma4_compat._errors import Gemma4CompatError

    works = (  # each leaves the outputs unchanged until it is trained
        ("4bit", IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])),
        ("8bit", RoadConfig(group_size=32, target_modules=["q_proj", "up_proj"])),
    )
    found = []
    bases: dict[str, Any] = {}
    references: dict[str, Any] = {}
    for quantization, config in works:
        bases[quantization] = workspace.load(quantization)
        references[quantization] = workspace.reference(quantization)
        model = get_peft_model(workspace.load(quantization), config)
        found.append(workspace.difference(references[quantization], model.eval()))
    cannot = (
        ("4bit", LoHaConfig(r=4, alpha=8, target_modules=["q_proj"])),
        ("8bit", HRAConfig(r=4, target_modules=["q_proj"])),
    )
    for quantization, config in cannot:
        try:
            workspace.outputs(get_peft_model(bases[quantization], config).eval())
        except Gemma4CompatError:
            found.append(workspace.difference(references[quantization], bases[quantization]))
        else:
            return Outcome(True, f"{config.peft_type.value} on a {quantization} base gives different outputs")
    return Outcome.of_parity(
        max(found), "IA3 and RoAd on quantized bases, and the model after LoHa and HRA were refused"
    )
