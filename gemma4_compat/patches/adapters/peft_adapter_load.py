"""Loading an adapter takes only the time that its weights need, not several times as much.

Symptom: silent: ``PeftModel.from_pretrained``, ``load_adapter`` and ``model.load_adapter`` take a second and more
for an adapter on all linears of a Gemma 4.

Cause: PEFT draws random weights for every layer, three times as many numbers as it keeps, casts them, and then
overwrites them with the adapter's file. It compares every module's name with every name in ``target_modules``. And it
walks through all modules repeatedly, with a nested generator for each.

Fix: Layers for which the file has both weights get uninitialized memory, and torch's generator is advanced past the
numbers that would have been drawn (a jump of the Mersenne Twister), so that later draws are the same. Weights that the
file lacks are drawn as usual. Names are looked up instead of compared, casts and moves that change nothing are
skipped, and the walks are loops. Modules, parameters, dtypes, devices and ``requires_grad`` are upstream's.

Remove when: PEFT neither draws the weights that a load replaces nor compares all names with all targets.
"""

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._gemma4.adapters import creation, fitting, state
from gemma4_compat._gemma4.adapters.translation import PREFIX
from gemma4_compat._gemma4.models import family, walk
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F71", kind="speed", severity="speed", affected=">=0.18.0", needs="peft-adapter-keys")

_UTILS = "peft.tuners.tuners_utils"
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


@PATCH.replaces("peft.peft_model", "PeftModel.load_adapter")
def load_adapter(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not family.has_parts(self):
        return original(self, *args, **kwargs)
    with walk.quick(self, fitting.base_of(self)):
        return original(self, *args, **kwargs)


@PATCH.replaces("peft.peft_model", "PeftModel.from_pretrained")
def from_pretrained(original: Original, cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if not family.has_parts(model):
        return original(cls, model, *args, **kwargs)
    with walk.quick(fitting.base_of(model)):
        return original(cls, model, *args, **kwargs)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")
def inject_adapter(
    original: Original,
    self: Any,
    model: Any,
    adapter_name: str,
    autocast_adapter_dtype: bool = True,
    low_cpu_mem_usage: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    arguments = (self, model, adapter_name, autocast_adapter_dtype, low_cpu_mem_usage, *args)
    adapter = fitting.being_loaded()
    if adapter is None or not family.has_parts(model):
        return original(*arguments, **kwargs)
    is_lora = type(self).__name__ == "LoraModel" and not low_cpu_mem_usage
    with creation.creating(adapter_name, _covered(adapter, model) if is_lora else {}) as created, walk.quick(model):
        adapter.created.append(created)
        return original(*arguments, **kwargs)


def _covered(adapter: fitting.Loading, model: Any) -> dict[str, tuple[int, ...]]:
    """Modules for which the file has both weights of a LoRA layer -> rank, inputs and outputs."""
    names = fitting.translate(adapter.keys, model).names
    shapes = {name: adapter.shapes[key] for key, name in names.items() if len(adapter.shapes.get(key, ())) == 2}
    found: dict[str, tuple[int, ...]] = {}
    for name, (rank, inputs) in shapes.items():
        module = name.removesuffix(_FIRST)
        outputs, same = shapes.get(module + _SECOND, (0, 0))
        if name.endswith(_FIRST) and name.startswith(PREFIX) and rank == same:
            found[module[len(PREFIX) :]] = rank, inputs, outputs
    return found


@PATCH.replaces("peft.tuners.lora.model", "LoraModel._create_and_replace")
def create_and_replace(
    original: Original,
    self: Any,
    lora_config: Any,
    adapter_name: str,
    target: Any,
    target_name: str,
    parent: Any,
    current_key: Any,
    **kwargs: Any,
) -> None:
    created = creation.being_created()
    if created is not None:
        created.config = lora_config
        created.current = current_key if kwargs.get("parameter_name") is None else None
        if created.current not in created.names:
            created.settle()  # it may draw
    original(self, lora_config, adapter_name, target, target_name, parent, current_key, **kwargs)


@PATCH.replaces("peft.tuners.lora.layer", "LoraLayer.update_layer")
def update_layer(
    original: Original, self: Any, adapter_name: str, r: Any, lora_alpha: Any, *args: Any, **kwargs: Any
) -> None:
    created = creation.being_created()
    if created is not None and created.is_ordinary(self, adapter_name, r, kwargs):
        _update_ordinary(created, self, adapter_name, r, lora_alpha)
        return
    if created is not None:
        created.settle()
    original(self, adapter_name, r, lora_alpha, *args, **kwargs)


def _update_ordinary(created: creation.Creation, layer: Any, name: str, r: int, lora_alpha: Any) -> None:
    """As upstream in this case, but without values for the weights."""
    import torch

    config = created.config
    dropout = config.lora_dropout
    layer.r[name], layer.lora_alpha[name] = r, lora_alpha
    layer.lora_dropout[name] = torch.nn.Dropout(p=dropout) if dropout > 0.0 else torch.nn.Identity()
    known = _place(layer)
    place, kind = known or (torch.device("cpu"), torch.float32)
    active = layer.active_adapters
    trained = name in active and not config.inference_mode
    first = created.linear(layer.in_features, r, place, kind, trained=trained)
    second = created.linear(r, layer.out_features, place, kind, trained=trained)
    layer.lora_A[name], layer.lora_B[name] = first, second
    created.count(first, second)
    created.made[str(created.current)] = layer
    layer.lora_bias[name] = config.lora_bias
    layer.scaling[name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
    layer.use_rslora[name] = config.use_rslora
    layer.use_dora[name] = config.use_dora
    if not known:  # upstream finds the place; for an offloaded layer, a patched upstream
        layer._move_adapter_to_device_of_base_layer(name)
    if len(layer.lora_A) == 1:
        layer._active_adapter = active
    else:
        layer.set_adapter(active, inference_mode=config.inference_mode)


def _place(layer: Any) -> tuple[Any, Any] | None:
    """The device and dtype to which upstream would move a layer's weights; None if not known at once."""
    import torch

    if not hasattr(layer, "_get_base_layer_device_and_dtype"):  # PEFT 0.18
        return None
    device, dtype = layer._get_base_layer_device_and_dtype(layer.get_base_layer())
    if device is None or device.type == "meta":
        return None
    return device, dtype if dtype is not None and (dtype.is_floating_point or dtype.is_complex) else torch.float32


@PATCH.replaces("peft.tuners.lora.model", "LoraModel._replace_module")
def replace_module(original: Original, self: Any, parent: Any, child_name: str, new_module: Any, child: Any) -> None:
    base = getattr(child, "base_layer", child)
    weight = vars(base)["_parameters"].get("weight") if creation.being_created() is not None else None
    if weight is None or base._modules or not _is_there(new_module, base, weight.device):
        original(self, parent, child_name, new_module, child)
    else:
        setattr(parent, child_name, new_module)


def _is_there(layer: Any, base: Any, device: Any) -> bool:
    """Whether everything that a layer adds is on the device, so upstream would move nothing."""
    if hasattr(base, "qweight") or hasattr(base, "W_q"):
        return False
    return all(
        value is None or value.device == device
        for child in layer._modules.values()
        if child is not base
        for module in walk.modules(child)
        for value in (*module._parameters.values(), *module._buffers.values())
    )


@PATCH.replaces("peft.tuners.tuners_utils", "cast_adapter_dtype")
def cast_adapter_dtype(original: Original, model: Any, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
    import torch

    adapter = fitting.being_loaded()
    if adapter is None or not autocast_adapter_dtype or not family.has_parts(model):
        original(model, adapter_name, autocast_adapter_dtype)
        return
    for created in adapter.created:
        if created.adapter == adapter_name and not created.is_read:
            for module in created.layers:
                if _is_low(module.weight.dtype):  # there is no value to convert
                    module.weight.data = torch.empty_like(module.weight.data, dtype=torch.float32)
    made = {layer for created in adapter.created if created.adapter == adapter_name for layer in created.made.values()}
    for layer in _tuner_layers(model):
        if layer in made and not layer.base_layer._modules:
            values = iter((layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight))
        else:
            values = _values(layer, adapter_name)
        if any(_is_low(value.dtype) for value in values):
            original(layer, adapter_name, autocast_adapter_dtype)


def _is_low(dtype: Any) -> bool:
    return bool(dtype.is_floating_point and dtype.itemsize < 4)


def _tuner_layers(model: Any) -> Iterator[Any]:
    """PEFT's layers, without those inside other PEFT layers."""
    kind = vars(sys.modules[_UTILS])["BaseTunerLayer"]
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, kind):
            yield module
        else:
            waiting += [child for child in module._modules.values() if child is not None]


def _values(layer: Any, adapter_name: str) -> Iterator[Any]:
    """Everything that a layer's containers may hold for an adapter."""
    for module in walk.modules(layer):
        if adapter_name in module._modules:
            for inner in walk.modules(module._modules[adapter_name]):
                yield from (value for value in inner._parameters.values() if value is not None)
        for own in (module._parameters, module._buffers):
            if own.get(adapter_name) is not None:
                yield own[adapter_name]


@PATCH.replaces("peft.tuners.tuners_utils", "check_target_module_exists")
def check_target_module_exists(original: Original, config: Any, key: str) -> Any:
    targets = getattr(config, "target_modules", None)
    if type(targets) is not set or creation.being_created() is None:
        return original(config, key)
    # Only the name itself, or its part after one of its dots, can match a target.
    targets = targets & _ends(key)
    if not targets and not config.modules_to_save and not getattr(config, "exclude_modules", None):
        return False
    return original(PlainView(config, target_modules=targets), key)


def _ends(name: str) -> set[str]:
    """The name, and what follows each of its dots."""
    found = {name}
    while at := name.find(".") + 1:
        name = name[at:]
        found.add(name)
    return found


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner._mark_only_adapters_as_trainable")
def mark_only_adapters_as_trainable(original: Original, self: Any, model: Any) -> None:
    biases = {getattr(self.peft_config[name], "bias", "none") for name in self.active_adapters}
    frozen = _frozen(self, model) if creation.being_created() is not None and biases <= {"none"} else None
    if frozen is None:
        original(self, model)
        return
    for parameter in frozen:
        parameter.requires_grad = False


def _frozen(tuner: Any, model: Any) -> list[Any] | None:
    """The trainable parameters of the base, if there are only LoRA layers; None if upstream must look."""
    kinds = vars(sys.modules[_UTILS])
    layers, wrapper = kinds["BaseTunerLayer"], kinds["AuxiliaryTrainingWrapper"]
    found: list[Any] = []
    waiting, seen = [model], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        children, own = module._modules, module._parameters
        if isinstance(module, layers):
            if type(module).__name__ not in creation.PLAIN or getattr(module, "frozen_peft_weight_names", None):
                return None
            waiting.append(children["base_layer"])
        elif isinstance(module, wrapper) or any(tuner.prefix in name for name in (*children, *own)):
            return None
        else:
            waiting += [child for child in children.values() if child is not None]
            found += [value for value in own.values() if value is not None and value.requires_grad]
    return found


@PATCH.replaces("peft.tuners.lora.model", "LoraModel._remap_adapter_state_dict_for_load", optional=True)
def remap_adapter_state_dict_for_load(
    original: Original, cls: Any, model: Any, config: Any, adapter_name: str, state_dict: Any
) -> Any:
    adapter = fitting.being_loaded()
    created = (
        {name for made in adapter.created if made.adapter == adapter_name for name in made.made} if adapter else ()
    )
    found = {}
    for key, value in state_dict.items():
        module, _, rest = key.removeprefix(PREFIX).rpartition(".lora_")
        if module not in created or f".lora_{rest}" not in (_FIRST, _SECOND):
            return original(cls, model, config, adapter_name, state_dict)
        found[f"{key.removesuffix('.weight')}.{adapter_name}.weight"] = value
    return found


@PATCH.replaces("peft.utils.save_and_load", "set_peft_model_state_dict")
def set_peft_model_state_dict(
    original: Original, model: Any, peft_model_state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    adapter = fitting.being_loaded()
    if adapter is None or not adapter.created or "load_state_dict" in vars(model):
        return original(model, peft_model_state_dict, *args, **kwargs)
    with in_place.replaced(model, "load_state_dict", lambda _, *given, **named: state.load(model, *given, **named)):
        result = original(model, peft_model_state_dict, *args, **kwargs)
    for created in adapter.created:
        created.is_read = True
        missing = {name.rpartition(".")[0] for name in result.missing_keys if ".lora_" in name}
        if missing:
            created.fill({id(module) for name, module in model.named_modules() if name in missing})
    return result


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.utils import load_peft_weights

    adapter = workspace.adapter("language")
    model = workspace.load()
    drawn = calls_of(torch.nn.init.kaiming_uniform_, lambda: PeftModel.from_pretrained(model, adapter))
    if drawn:
        return Outcome(True, f"random weights were drawn {drawn} times, for layers whose weights the file has")
    reference = get_peft_model(workspace.load(), LoraConfig.from_pretrained(adapter)).eval()
    parameters = dict(reference.named_parameters())
    with torch.no_grad():
        for name, value in load_peft_weights(str(adapter), device="cpu").items():
            parameters[name.replace(".weight", ".default.weight")].copy_(value)
    found = workspace.difference(workspace.outputs(reference), PeftModel.from_pretrained(workspace.load(), adapter))
    return Outcome.of_parity(found, "an adapter without random weights before its own")


def calls_of(function: Any, action: Callable[[], Any]) -> int:
    """How often a function is called in ``action``, by this thread."""
    calls = 0

    def count(frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is function.__code__

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls
