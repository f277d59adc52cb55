"""Load and save of states, in every form."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

from tests.generated.search.differential.table import ALL, CLASSES, EVERYWHERE, LORA, LORAS, WEIGHTS, Area, Expect
from tests.generated.search.differential.world import World

area = Area("states")
KEPT = ("E2B", "E2B-lora", "E2B-4bit", "E2B-8bit", "E2B-text", "12B")


@area.call(
    variants={"": {}, "strict=False": {"strict": False}, "assign": {"assign": True}},
    kinds=KEPT,
    places=EVERYWHERE,
)
def load_own_state(world: World, **options: Any) -> Any:
    """``model.load_state_dict(model.state_dict())``"""
    before = world.logits()
    result = world.model.load_state_dict(world.model.state_dict(), **options)
    return Expect([world.logits(), len(result.unexpected_keys)], [before, 0])


def _other(world: World) -> dict[str, Any]:
    """The state of a model on one device, with other norms."""
    import torch

    state = world.cls.from_pretrained(world.checkpoint, dtype=torch.bfloat16).state_dict()
    return {name: value * 1.5 if name.endswith("norm.weight") else value for name, value in state.items()}


@area.call(
    variants={"": {}, "strict=False": {"strict": False}, "assign": {"assign": True}}, kinds=CLASSES, places=EVERYWHERE
)
def load_other_state(world: World, **options: Any) -> Any:
    """``load_state_dict`` of another model's weights"""
    world.model.load_state_dict(_other(world), **options)
    return world.logits()


@area.call(kinds=("E2B", "E2B-4bit"))
def load_state_after_forward(world: World) -> Any:
    """``load_state_dict`` of another state between two forwards"""
    world.logits()
    world.model.load_state_dict(_other(world), strict=False)
    return world.logits()


@area.call(variants={"weights_only": {"weights_only": True}, "pickle": {"weights_only": False}})
def state_through_file(world: World, weights_only: bool) -> Any:
    """``torch.save(model.state_dict())``, ``torch.load``, ``load_state_dict``"""
    import torch

    file = Path(world.new_folder()) / "state.pt"
    torch.save(world.model.state_dict(), file)
    world.model.load_state_dict(torch.load(file, weights_only=weights_only))
    return world.logits()


@area.call(kinds=ALL)
def state_names(world: World) -> Any:
    """The names in ``state_dict()``"""
    return list(world.model.state_dict())


@area.call(kinds=WEIGHTS)
def state_shapes(world: World) -> Any:
    """names, shapes and dtypes in ``state_dict()``"""
    return {name: [list(value.shape), value.dtype] for name, value in world.model.state_dict().items()}


@area.call(kinds=("E2B", "E2B-lora"))
def state_values(world: World) -> Any:
    """The values in ``state_dict()``"""
    return dict(world.model.state_dict())


@area.call()
def state_keep_vars(world: World) -> Any:
    """``state_dict(keep_vars=True, prefix=...)``"""
    state = world.model.state_dict(keep_vars=True, prefix="own.")
    return [sorted(state), sum(value.requires_grad for value in state.values())]


@area.call()
def state_hooks(world: World) -> Any:
    """Hooks on ``state_dict`` and ``load_state_dict``"""
    seen = []
    world.model.register_state_dict_pre_hook(lambda *_: seen.append("before"))
    world.model.register_load_state_dict_post_hook(lambda *_: seen.append("after"))
    world.model.load_state_dict(world.model.state_dict())
    return [seen, world.logits()]


@area.call(kinds=ALL)
def parameters(world: World) -> Any:
    """``named_parameters()``: names, shapes, dtypes, ``requires_grad``"""
    return {
        name: [list(value.shape), value.dtype, value.requires_grad] for name, value in world.model.named_parameters()
    }


@area.call(kinds=ALL)
def buffers(world: World) -> Any:
    """``named_buffers()``"""
    return dict(world.model.named_buffers())


@area.call(kinds=WEIGHTS)
def get_parameter(world: World) -> Any:
    """``get_parameter``, ``get_buffer``, ``get_submodule``"""
    name = next(name for name, _ in world.model.named_parameters() if name.endswith("layers.1.mlp.up_proj.weight"))
    module = world.model.get_submodule(name.removesuffix(".weight"))
    return [world.model.get_parameter(name), type(module).__name__]


@area.call(kinds=("E2B", "E2B-lora", "E2B-4bit"), places=EVERYWHERE)
def best_weights_in_memory(world: World) -> Any:
    """A deep copy of the state, changed weights, then the copy comes back"""
    import torch

    before = world.logits()
    best = copy.deepcopy(world.model.state_dict())
    with torch.no_grad():
        for parameter in world.model.parameters():
            if parameter.device.type != "meta" and parameter.dtype.is_floating_point:
                parameter.mul_(1.5)
    world.model.load_state_dict(best)
    return Expect(world.logits(), before)


@area.call(places=EVERYWHERE)
def moving_average(world: World) -> Any:
    """An exponential moving average of the state, loaded"""
    average = {name: value.clone() for name, value in world.model.state_dict().items()}
    for name, value in world.model.state_dict().items():
        if value.dtype.is_floating_point:
            average[name].mul_(0.5).add_(value, alpha=0.5)
    world.model.load_state_dict(average)
    return world.logits()


@area.call(kinds=("E2B", "E2B-lora"))
def submodule_state(world: World) -> Any:
    """``layer.load_state_dict(layer.state_dict())`` of each layer"""
    before = world.logits()
    for layer in world.text.layers:
        layer.load_state_dict(layer.state_dict())
    return Expect(world.logits(), before)


@area.call(places=EVERYWHERE)
def submodule_other_state(world: World) -> Any:
    """Another state into the text model"""
    names = "model.language_model."
    world.text.load_state_dict(
        {name.removeprefix(names): value for name, value in _other(world).items() if name.startswith(names)}
    )
    return world.logits()


@area.call()
def partial_state(world: World) -> Any:
    """``strict=False`` with some weights: what is missing"""
    state = {name: value for name, value in _other(world).items() if "layers.1." in name}
    result = world.model.load_state_dict(state, strict=False)
    return [sorted(result.missing_keys), result.unexpected_keys, world.logits()]


@area.call(variants=["missing", "unexpected", "shape", "type"])
def bad_state(world: World, how: str) -> Any:
    """``load_state_dict`` of a state that does not fit"""
    import torch

    state = dict(_other(world))
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    if how == "missing":
        del state[name]
    elif how == "unexpected":
        state["more"] = torch.zeros(1)
    elif how == "shape":
        state[name] = torch.zeros(3, 3)
    else:
        state = [state]  # type: ignore[assignment]
    world.model.load_state_dict(state)
    return None


@area.call(kinds=("E2B", "E2B-4bit", "E2B-8bit", "E2B-text", "12B", "26B"), places=EVERYWHERE)
def save_and_load(world: World) -> Any:
    """``save_pretrained``, ``from_pretrained``"""
    folder = world.new_folder()
    world.model.save_pretrained(folder)
    return world.logits(world.cls.from_pretrained(folder, dtype="auto").eval())


@area.call(
    variants={
        "shards": {"max_shard_size": "100KB"},
        "variant": {"variant": "own"},
        "state_dict": {"given": True},
        "save_original_format=False": {"save_original_format": False},
        "is_main_process": {"is_main_process": False},
    },
)
def save_how(world: World, given: bool = False, **options: Any) -> Any:
    """``save_pretrained`` with options: the files and what is in them"""
    from safetensors.torch import load_file

    folder = Path(world.new_folder())
    if given:
        options["state_dict"] = world.model.state_dict()
    world.model.save_pretrained(folder, **options)
    files = sorted(path.name for path in folder.iterdir())
    return [files, {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}]


@area.call(kinds=LORAS, places=EVERYWHERE)
def save_adapter(world: World) -> Any:
    """``PeftModel.save_pretrained``, and the adapter loaded again"""
    folder = world.new_folder()
    world.model.save_pretrained(folder)
    return world.logits(world.with_adapter(world.dispatch(world.fresh()), folder))


@area.call(kinds=("E2B", "E2B-text"))
def safetensors_model(world: World) -> Any:
    """``safetensors.torch.save_model`` and ``load_model``"""
    from safetensors.torch import load_model, save_model

    before = world.logits()
    file = Path(world.new_folder()) / "model.safetensors"
    save_model(world.model, str(file))
    load_model(world.model, str(file))
    return Expect(world.logits(), before)


@area.call(kinds=("E2B", "E2B-lora", "E2B-4bit", "E2B-8bit", "12B"))
def whole_model_file(world: World) -> Any:
    """``torch.save(model)``, ``torch.load``"""
    import torch

    file = io.BytesIO()
    torch.save(world.model, file)
    file.seek(0)
    return world.logits(torch.load(file, weights_only=False))


@area.call(
    variants={"fresh": {"used": False}, "used": {"used": True}}, kinds=("E2B", "E2B-lora", "E2B-4bit", "E2B-8bit")
)
def pickled(world: World, used: bool) -> Any:
    """``pickle.dumps(model)``, ``pickle.loads``"""
    if used:
        world.logits()
    return world.logits(pickle.loads(pickle.dumps(world.model)))


@area.call(
    variants={"fresh": {"used": False}, "used": {"used": True}},
    kinds=("E2B", "E2B-lora", "E2B-4bit", "E2B-8bit"),
)
def deep_copy(world: World, used: bool) -> Any:
    """``copy.deepcopy(model)``: both answer"""
    if used:
        world.logits()
    other = copy.deepcopy(world.model)
    return [world.logits(other), world.logits()]


@area.call()
def shallow_copy(world: World) -> Any:
    """``copy.copy(model)``"""
    return world.logits(copy.copy(world.model))


@area.call(kinds=("E2B", "E2B-lora"))
def layer_copy(world: World) -> Any:
    """A deep copy of a layer, called"""
    import torch

    layer = copy.deepcopy(world.text.layers[2].mlp)
    with torch.no_grad():
        return layer(torch.ones(1, 2, 64, dtype=torch.bfloat16))


@area.call(kinds=("E2B", "E2B-lora"))
def distributed_state(world: World) -> Any:
    """``torch.distributed.checkpoint``'s ``get_model_state_dict``, ``set_model_state_dict``"""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    before = world.logits()
    set_model_state_dict(world.model, get_model_state_dict(world.model))
    return Expect(world.logits(), before)


@area.call(kinds=LORA)
def adapter_state(world: World) -> Any:
    """``get_peft_model_state_dict``, ``set_peft_model_state_dict``"""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    state = {name: value * 2 for name, value in get_peft_model_state_dict(world.model).items()}
    set_peft_model_state_dict(world.model, state)
    return [state, world.logits()]


@area.call(variants=["get_state_dict_offloaded_model", "get_state_dict_from_offload"])
def accelerate_state(world: World, how: str) -> Any:
    """Accelerate's readers of an offloaded model's state"""
    from accelerate.utils import modeling

    if how == "get_state_dict_offloaded_model":
        world.needs(world.split, "nothing is offloaded")
        return Expect(modeling.get_state_dict_offloaded_model(world.model), dict(_plain(world)))
    name = "model.language_model.layers.2.mlp.up_proj"
    module = world.model.get_submodule(name)
    state = modeling.get_state_dict_from_offload(
        module, f"{name}.weight", {f"{name}.weight": ""}, device_to_put_offload="cpu"
    )
    return Expect(state, {f"{name}.weight": _plain(world)[f"{name}.weight"]})


def _plain(world: World) -> dict[str, Any]:
    import torch

    return world.cls.from_pretrained(world.checkpoint, dtype=torch.bfloat16).state_dict()


@area.call(kinds=("E2B", "12B", "E2B-text"))
def loaded_with_state(world: World) -> Any:
    """``from_pretrained(None, config=, state_dict=)``"""
    import torch

    model = world.cls.from_pretrained(
        None,
        config=world.cls.config_class.from_pretrained(world.checkpoint),
        state_dict=_plain(world),
        dtype=torch.bfloat16,
    )
    return world.logits(world.dispatch(model.eval()))


@area.call()
def in_place_changes(world: World) -> Any:
    """Weights that are at hand, changed in place"""
    import torch

    with torch.no_grad():
        world.text.norm.weight.mul_(1.5)
        world.text.layers[1].mlp.up_proj.weight.mul_(0.5)
    return world.logits()
