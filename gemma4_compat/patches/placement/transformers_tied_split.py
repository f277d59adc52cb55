"""A tied head and its embedding can be under different entries of a device map.

Symptom: ``KeyError: 'lm_head.weight'`` or ``ValueError: weight is on the meta device, we need a `value` to put in on
0``, when the embedding and the head that shares its weight are under different entries of a device map, and one of
them is on disk.

Cause: A checkpoint holds a tied weight once, under the name of the embedding. ``accelerate_disk_offload`` builds the
index of offloaded weights from the names in the checkpoint, so an offloaded head has no entry under its own name. A
head that stays in memory is tied to an embedding that is on meta.

Fix: The index gets an entry for every name of a tied weight that is on disk. A name that is not on disk gets its value
before ``accelerate_dispatch`` runs. The head then has its own copy, as large as the embedding: the price of a map that
keeps one of them in memory and not the other.

A checkpoint in torch's own format holds both names. ``PreTrainedModel.tie_weights`` compares their values there, which
a tensor on meta does not have. With this patch, it skips such pairs.

``tie_weights`` of a dispatched model, which ``resize_token_embeddings`` also calls, would give both modules one
parameter, even one on meta: NaN, or the old weight. With this patch each keeps its place, and gets the tied value. If
an adapter's trainable copy stands in for the embedding (``modules_to_save``), upstream ties the head to the copy: the
head shares it on the device, learns with it, and is offloaded again when it is tied to the embedding. Outputs are
bit-exact.

Remove when: transformers indexes a tied weight under all its names and loads those that stay in memory.
"""

import sys
from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat._offload.weights import tied_weights
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F15 F44",
    severity="crash",
    affected=">=5.5",
    acts_on="every model",
    requires="accelerate",
    needs="transformers-offloaded-embedding accelerate-tied-on-disk",
)


@PATCH.replaces("transformers.integrations.accelerate", "accelerate_disk_offload")
def accelerate_disk_offload(
    original: Callable[..., dict[str, Any]],
    model: Any,
    disk_offload_folder: Any,
    checkpoint_files: Any,
    device_map: Any,
    *args: Any,
    **kwargs: Any,
) -> dict[str, Any]:
    index = original(model, disk_offload_folder, checkpoint_files, device_map, *args, **kwargs)
    unknown = [names for names in _tied(model) if _on_disk(names, device_map) and not index.keys() & set(names)]
    if unknown:
        # Upstream looks up entries on disk; if everything is on disk, it finds the name in the checkpoint.
        everything = original(model, disk_offload_folder, checkpoint_files, {"": "disk"}, *args, **kwargs)
        for names in unknown:
            entry = next((everything[name] for name in names if name in everything), None)
            if (
                entry is not None
            ):  # otherwise the checkpoint is not in safetensors format and is written before the dispatch
                index.update(dict.fromkeys(_on_disk(names, device_map), entry))
    return index


@PATCH.replaces("transformers.integrations.accelerate", "accelerate_dispatch")
def accelerate_dispatch(
    original: Original,
    model: Any,
    hf_quantizer: Any,
    device_map: Any,
    offload_folder: Any,
    offload_index: Any,
    offload_buffers: Any,
) -> None:
    for names in _tied(model):
        if on_disk := _on_disk(names, device_map):
            _complete(model, names, on_disk, offload_folder, offload_index)
    original(model, hf_quantizer, device_map, offload_folder, offload_index, offload_buffers)


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel.tie_weights")
def tie_weights(original: Original, self: Any, missing_keys: set[str] | None = None, *args: Any, **kwargs: Any) -> Any:
    # A checkpoint in torch's own format has both names. Upstream compares their values, which meta lacks.
    if missing_keys is None:
        with tied_weights.tied_apart(self):
            return original(self, missing_keys, *args, **kwargs)
    pairs = self.all_tied_weights_keys
    apart = {
        name: owner
        for name, owner in pairs.items()
        if not missing_keys & {name, owner}
        and "meta" in {self.get_parameter(name).device.type, self.get_parameter(owner).device.type}
    }
    if not apart:
        return original(self, missing_keys, *args, **kwargs)
    self.all_tied_weights_keys = {name: owner for name, owner in pairs.items() if name not in apart}
    try:
        return original(self, missing_keys, *args, **kwargs)
    finally:
        self.all_tied_weights_keys = {**self.all_tied_weights_keys, **apart}


def _complete(model: Any, names: list[str], on_disk: list[str], folder: Any, index: dict[str, Any]) -> None:
    """Give each name of a tied weight that is on disk an entry, and every other name a value."""
    import torch
    from accelerate.utils import OffloadedWeightsLoader

    # The checkpoint's weight is not that of a layer that was quantized while loading.
    stored = {name: index[name] for name in names if name in index and _is_of(index[name], model.get_parameter(name))}
    entry = next(iter(stored.values()), None)
    if entry is None:
        write = vars(sys.modules["transformers.integrations.accelerate"])["offload_weight"]
        entry = write(model.get_parameter(on_disk[0]).data, on_disk[0], folder, index)[on_disk[0]]
    for name in names:
        weight = model.get_parameter(name)
        if name in on_disk:
            index[name] = stored.get(name, entry)
        elif weight.device.type == "meta":
            value = OffloadedWeightsLoader(index={name: entry})[name].to(weight.dtype)
            owner, _, attribute = name.rpartition(".")
            if weight.is_floating_point():
                parameter = torch.nn.Parameter(value, requires_grad=weight.requires_grad)
            else:
                parameter = quant_states.with_data(weight, value)
            model.get_submodule(owner)._parameters[attribute] = parameter


def _is_of(entry: dict[str, Any], weight: Any) -> bool:
    """Whether an entry of the index can be the value of this weight."""
    return weight.is_floating_point() or entry.get("dtype") == str(weight.dtype).removeprefix("torch.")


def _tied(model: Any) -> list[list[str]]:
    """The names of each tied weight, its owner first."""
    groups: dict[str, list[str]] = {}
    for name, owner in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        groups.setdefault(owner, [owner]).append(name)
    return list(groups.values())


def _on_disk(names: list[str], device_map: Any) -> list[str]:
    """The names that the map puts on disk."""
    entries = {name: device_maps.entry_for(name, device_map) for name in names}
    return [name for name, entry in entries.items() if entry is not None and device_map[entry] == "disk"]


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    reference = workspace.reference()
    found = []
    for offloaded in ("lm_head", "model.language_model.embed_tokens"):
        placement = tiny.device_map(workspace.load(), "none", main=workspace.main, offloaded="disk")
        placement[offloaded] = "disk"
        folder = workspace.new_folder()
        model = tiny.load(workspace.checkpoint, device_map=placement, offload_folder=folder)
        if model.hf_device_map != placement:
            return Outcome(True, f"hf_device_map became {model.hf_device_map}")
        found.append(workspace.difference(reference, model))
    return Outcome.of_parity(max(found), "tied head and embedding apart, one of them on disk")
