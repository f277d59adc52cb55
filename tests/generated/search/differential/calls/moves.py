"""Casts, moves, copies of a whole model, and what a model says of itself."""

from __future__ import annotations

import functools
from typing import Any

from tests.generated.search.differential.table import ALL, CLASSES, EVERYWHERE, LORA, WEIGHTS, Area, Expect
from tests.generated.search.differential.world import World

area = Area("moves")
CAST = ("E2B", "E2B-lora", "E2B-text", "12B")
_DTYPES = {"bfloat16": {"dtype": "bfloat16"}, "float16": {"dtype": "float16"}, "float32": {"dtype": "float32"}}


@area.call(variants=_DTYPES, kinds=CAST)
def to_dtype(world: World, dtype: str) -> Any:
    """``model.to(dtype)``, then it answers"""
    import torch

    return world.logits(world.model.to(getattr(torch, dtype)))


@area.call(variants=["float", "half", "bfloat16", "double"], kinds=CAST)
def cast(world: World, how: str) -> Any:
    """``model.float()`` and its siblings"""
    return world.logits(getattr(world.model, how)())


@area.call(variants=["to", "bfloat16", "type"], kinds=("E2B", "E2B-text", "12B", "31B"))
def cast_to_own_dtype(world: World, how: str) -> Any:
    """A cast to the dtype that the model has: 200 tokens answer as before"""
    import torch

    ids = torch.randint(3, 240, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = world.model(input_ids=ids).logits
        arguments = {"bfloat16": [], "to": [torch.bfloat16], "type": [torch.bfloat16]}[how]
        model = getattr(world.model, how)(*arguments)
        return Expect(model(input_ids=ids).logits, before)


@area.call(kinds=CAST)
def cast_there_and_back(world: World) -> Any:
    """``model.float().bfloat16()``"""
    return world.logits(world.model.float().bfloat16())


@area.call(
    variants={"cpu": {"how": "cpu"}, "to": {"how": "to", "to": "cpu"}, "none": {"how": "to", "to": None}}, kinds=ALL
)
def to_cpu(world: World, how: str, to: Any = ()) -> Any:
    """``model.cpu()``, ``model.to("cpu")``"""
    arguments = [] if to == () else [to]
    return world.logits(getattr(world.model, how)(*arguments))


@area.call(kinds=WEIGHTS)
def to_where_it_is(world: World) -> Any:
    """``model.to(model.device)``"""
    return world.logits(world.model.to(world.model.device))


@area.call(kinds=("E2B", "E2B-lora", "E2B-4bit"))
def to_like_tensor(world: World) -> Any:
    """``model.to(tensor)``"""
    import torch

    return world.logits(world.model.to(torch.zeros(1, dtype=torch.bfloat16)))


@area.call(kinds=("E2B", "E2B-4bit"))
def to_meta(world: World) -> Any:
    """``model.to("meta")``: where everything is"""
    model = world.model.to("meta")
    return sorted({str(parameter.device) for parameter in model.parameters()})


@area.call(kinds=("E2B", "E2B-4bit"))
def to_empty(world: World) -> Any:
    """``model.to_empty(device="meta")``"""
    return sorted({str(parameter.device) for parameter in world.model.to_empty(device="meta").parameters()})


@area.call(variants=["cuda", "to", "mps"], kinds=("E2B", "E2B-4bit"))
def to_absent_device(world: World, how: str) -> Any:
    """A move to a device that is not there"""
    import torch

    world.needs(not torch.cuda.is_available(), "a GPU is there")
    if how == "cuda":
        world.model.cuda()
    else:
        world.model.to({"to": "cuda", "mps": "mps"}[how])
    return None


@area.call(variants=["half", "float", "to"], kinds=("E2B-4bit", "E2B-8bit"))
def cast_quantized(world: World, how: str) -> Any:
    """A cast of a quantized model"""
    import torch

    return world.logits(world.model.to(torch.float32) if how == "to" else getattr(world.model, how)())


@area.call(kinds=("E2B", "E2B-lora"))
def submodule_cast(world: World) -> Any:
    """``model.lm_head.float()``, and norms in float32: their dtypes"""
    for name, module in world.model.named_modules():
        if name.endswith("norm"):
            module.float()
    return sorted({f"{name.rpartition('.')[2]} {value.dtype}" for name, value in world.model.named_parameters()})


@area.call(kinds=("E2B", "E2B-4bit"))
def layer_to_cpu(world: World) -> Any:
    """``layer.to("cpu")``"""
    world.text.layers[1].to("cpu")
    return world.logits()


@area.call(variants=["eval", "train"], kinds=ALL)
def mode(world: World, how: str) -> Any:
    """``model.eval()``, ``model.train()``: it answers"""
    return world.logits(getattr(world.model, how)())


@area.call(variants={"True": {"value": True}, "False": {"value": False}}, kinds=("E2B", "E2B-lora", "E2B-text"))
def requires_grad_(world: World, value: bool) -> Any:
    """``model.requires_grad_(...)``, then a forward"""
    model = world.model.requires_grad_(value)
    return [sum(parameter.requires_grad for parameter in model.parameters()), world.logits()]


@area.call(kinds=ALL)
def zero_grad(world: World) -> Any:
    """``model.zero_grad()``"""
    world.model.zero_grad()
    return world.logits()


@area.call(kinds=("E2B", "E2B-4bit"))
def share_memory(world: World) -> Any:
    """``model.share_memory()``"""
    return world.logits(world.model.share_memory())


@area.call(kinds=("E2B", "E2B-lora"))
def applied(world: World) -> Any:
    """``model.apply(function)``"""
    seen: list[str] = []
    world.model.apply(lambda module: seen.append(type(module).__name__))
    return [len(seen), world.logits()]


@area.call(
    variants=["num_parameters", "get_memory_footprint", "dtype", "device", "main_input_name", "is_quantized"],
    kinds=ALL,
)
def asked(world: World, what: str) -> Any:
    """What a model says of itself"""
    base = world.base
    if what == "device":
        world.needs(not world.split or world.place != "embeddings", "")
        return str(base.device)
    value = getattr(base, what, None)
    return value() if callable(value) else value


@area.call(kinds=ALL)
def num_parameters_trainable(world: World) -> Any:
    """``num_parameters(only_trainable=True, exclude_embeddings=True)``"""
    return [world.base.num_parameters(only_trainable=True), world.base.num_parameters(exclude_embeddings=True)]


@area.call(kinds=ALL)
def printed(world: World) -> Any:
    """``print(model)``: its lines"""
    return len(str(world.model).splitlines())


@area.call(kinds=ALL)
def modules(world: World) -> Any:
    """``named_modules()``: names and classes"""
    return {name: type(module).__name__ for name, module in world.model.named_modules()}


@area.call(kinds=ALL)
def inputs_to_device(world: World) -> Any:
    """``inputs.to(model.device)``, then a forward: every model card"""
    import torch

    device = world.model.device
    with torch.no_grad():
        return world.model(**{name: value.to(device) for name, value in world.inputs().items()}).logits


@area.call(kinds=("E2B", "E2B-lora", "E2B-text"))
def functional_call(world: World) -> Any:
    """``torch.func.functional_call`` with its own parameters"""
    import torch

    parameters = dict(world.model.named_parameters())
    with torch.no_grad():
        return torch.func.functional_call(world.model, parameters, (), world.inputs()).logits


@area.call(
    variants=["inference_mode", "no_grad", "enable_grad", "autocast"],
    kinds=("E2B", "E2B-lora", "E2B-4bit", "E2B-8bit", "12B"),
)
def under(world: World, context: str) -> Any:
    """A forward under ``torch.inference_mode()`` and others"""
    import torch

    contexts = {"autocast": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)}
    with contexts.get(context, getattr(torch, context, None))():
        return world.model(**world.inputs()).logits


@area.call(variants=["model", "forward"])
def compiled(world: World, what: str) -> Any:
    """``torch.compile`` with ``backend="eager"``"""
    import torch

    if what == "model":
        return world.logits(torch.compile(world.model, backend="eager"), media=False)
    world.model.forward = torch.compile(world.model.forward, backend="eager")
    return world.logits(media=False)


@area.call()
def data_parallel(world: World) -> Any:
    """``torch.nn.DataParallel`` without a GPU"""
    import torch

    return world.logits(torch.nn.DataParallel(world.model))


@area.call(kinds=("E2B", "E2B-lora"))
def flattened_parameters(world: World) -> Any:
    """``parameters_to_vector``"""
    import torch

    small = [parameter for parameter in world.model.parameters() if parameter.ndim == 1]
    return torch.nn.utils.parameters_to_vector(small)


@area.call(places=EVERYWHERE, kinds=("E2B", "E2B-4bit"))
def two_models(world: World) -> Any:
    """Two models of one checkpoint, used in turns"""
    other = world.dispatch(world.workspace.load(world.quantization))
    return [world.logits(), world.logits(other), world.logits(), world.logits(other)]


@area.call(kinds=CLASSES)
def deleted(world: World) -> Any:
    """``del model``: nothing keeps it alive"""
    import gc
    import weakref

    world.logits()
    dead = weakref.ref(world.model.model)
    del world.model
    gc.collect()
    return dead() is None


@area.call(kinds=LORA)
def peft_attributes(world: World) -> Any:
    """Attributes of a PeftModel that are the base model's"""
    model = world.model
    return [str(model.dtype), model.config.model_type, model.can_generate(), type(model.get_base_model()).__name__]
