"""Device-map entries inside other entries, including the catch-all ``""``, go straight to their device.

Symptom: ``ValueError: position_embedding_table is on the meta device, we need a `value` to put in on 0`` from a device
map with an entry inside another, most often inside the catch-all ``""``: ``{"": 0, "model.vision_tower": "disk"}``
cannot be loaded. With "cpu" instead of "disk" nothing is raised, but everything that should stay on the CPU passes
through the GPU first (E4B: 9.33 GiB while loading, for a model that ends at 3.2). ``{"": "disk", "lm_head": 0}`` ends
in ``FileNotFoundError: ... index.json``. With ``{"": 1, "model.vision_tower": 0}`` everything is silently on GPU 0.

Cause: ``attach_align_device_hook_on_blocks`` lets the hook of an outer entry take everything inside it. The hook of
the inner entry comes too late: the outer hook has already moved what it should have left, and tensors that it should
not have offloaded have lost their values. ``extract_submodules_state_dict`` selects the weights of an entry by its
name and a dot, which matches none for ``""``. ``dispatch_model`` overwrites the entry ``""`` with the main device, for
which it takes any GPU of the map.

Fix: A nested map is read as its most specific entries. A module that an outer entry covers only in part keeps a hook
for its own tensors. The same rule decides which weights are offloaded. ``hf_device_map`` remains the map that the user
gave. The main device is that of ``""``, if it computes and no other was requested.

Remove when: accelerate reads a nested device map as its most specific entries.
"""

import contextvars
from collections.abc import Mapping
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F14", severity="crash", affected=">=1.12", acts_on="every model", after="accelerate-skip-keys")

# The map of the dispatch running in this thread, for the function that collects the weights to offload.
_dispatched: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("dispatched", default=None)


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(
    original: Original, model: Any, device_map: Any, main_device: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if main_device is None and device_map.get("", "cpu") not in ("cpu", "disk"):
        main_device = device_map[""]
    with in_place.bound(_dispatched, device_map):
        return original(model, device_map, main_device, *args, **kwargs)


@PATCH.replaces("accelerate.utils.offload", "extract_submodules_state_dict")
def extract_submodules_state_dict(
    original: Original, state_dict: Mapping[str, Any], submodule_names: list[str]
) -> Any:
    placement = _dispatched.get()
    if placement is None or not (device_maps.is_nested(placement) or "" in submodule_names):
        return original(state_dict, submodule_names)
    wanted = set(submodule_names)
    return {name: value for name, value in state_dict.items() if device_maps.entry_for(name, placement) in wanted}


@PATCH.replaces("accelerate.hooks", "attach_align_device_hook_on_blocks")
def attach_align_device_hook_on_blocks(
    original: Original,
    module: Any,
    execution_device: Any = None,
    offload: Any = False,
    weights_map: Any = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: Any = None,
) -> None:
    common = {
        "offload_buffers": offload_buffers,
        "skip_keys": skip_keys,
        "tied_params_map": tied_params_map,
    }
    whole = isinstance(offload, Mapping) and isinstance(execution_device, Mapping) and not module_name
    entries, opened = _most_specific(module, offload) if whole else ({}, {})
    if opened:
        main = execution_device.get("")
        devices = {name: execution_device[entry] for name, entry in {**entries, **opened}.items()}
        offload = {name: offload[entry] for name, entry in {**entries, **opened}.items()}
        execution_device = {"": main, **{name: devices[name] for name in entries}}
    original(
        module,
        execution_device=execution_device,
        offload={name: offload[name] for name in entries} if opened else offload,
        weights_map=weights_map,
        module_name=module_name,
        preload_module_classes=preload_module_classes,
        **common,
    )
    for name in opened:
        _hook_own_tensors(module.get_submodule(name), name, devices[name], offload[name], weights_map, common)


def _most_specific(model: Any, placement: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """A nested map as entries that do not contain each other.

    Returns two mappings of module names to keys of ``placement``: the entries, and the modules that had to be split
    into parts, whose own tensors still belong to the key. The second is empty if the map is not nested.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    keys = [key for key in placement if key in modules]
    around = {outer for key in keys for outer in device_maps.ancestors(key)}
    entries = {key: key for key in keys if key not in around}
    opened: dict[str, str] = {}
    waiting = [(key, key) for key in keys if key in around]
    while waiting:
        name, key = waiting.pop()
        opened[name] = key
        for child in modules[name]._modules:
            part = f"{name}.{child}" if name else child
            if part in placement or modules.get(part) is None:
                continue
            if part in around:
                waiting.append((part, key))
            else:
                entries[part] = key
    return entries, opened


def _hook_own_tensors(
    module: Any, name: str, device: Any, offload: bool, weights_map: Any, common: dict[str, Any]
) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from accelerate.utils import PrefixedDataset
    from accelerate.utils.modeling import named_module_tensors

    own = any(True for _ in named_module_tensors(module))
    if not name and not own:
        return  # accelerate gives the model itself a hook; it has no tensors to place
    prefix = f"{name}." if name else ""
    hook = AlignDevicesHook(
        execution_device=device,
        offload=offload and own,
        weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
        place_submodules=False,
        **common,
    )
    add_hook_to_module(module, hook, append=True)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    reference = workspace.reference()
    names = [f"model.{name}" for name in tiny.towers(workspace.load())]
    inside = {"model.vision_tower": "encoder", "model.embed_vision": "multimodal_embedder"}[names[0]]
    placement = {"": workspace.main, **dict.fromkeys(names, "disk"), f"{names[0]}.{inside}": workspace.main}
    folder = workspace.new_folder()
    model = tiny.load(workspace.checkpoint, device_map=placement, offload_folder=folder)
    if model.hf_device_map != placement:
        return Outcome(True, f"hf_device_map became {model.hf_device_map}")
    wrong = [
        name
        for name, tensor in model.named_parameters()
        if tensor.is_meta != (placement[device_maps.entry_for(name, placement) or ""] == "disk")
    ]
    if wrong:
        return Outcome(True, f"{len(wrong)} parameters are not where the map puts them, {wrong[0]} among them")
    return Outcome.of_parity(workspace.difference(reference, model), "catch-all entry, parts of it on disk")
