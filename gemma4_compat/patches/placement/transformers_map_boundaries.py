"""A device-map entry for layer 1 does not apply to layers 10 to 19 as well.

Symptom: silent: an entry ``...layers.1`` of a device map also applies to layers 10 to 19 while the model loads. They
are loaded to another device than the map says, such as the CPU (4-bit weights are quantized there, with other scales
than on the GPU), and moved afterwards. With "disk" the load ends in ``ValueError: weight is on the meta device, we
need a `value` to put in on 0``.

Cause: ``expand_device_map`` matches entries as prefixes of parameter names, not as whole module names. The defect
needs a map that names layer 1 and covers layer 10 with a more general entry, such as the catch-all ``""``.

Fix: A parameter belongs to the most specific entry that names it or a module around it. A parameter without an entry
is on the CPU, as upstream does it.

Remove when: ``expand_device_map`` in transformers matches device-map entries at module boundaries.
"""

from collections.abc import Iterable
from typing import Any

from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F14",
    severity="wrong_result",
    affected=">=5.5",
    acts_on="every model",
    requires="accelerate",
    needs="accelerate-nested-map",
)


@PATCH.replaces("transformers.integrations.accelerate", "expand_device_map")
def expand_device_map(original: Original, device_map: Any, param_names: Iterable[str]) -> Any:
    if device_map is None:
        return original(device_map, param_names)
    entries = {name: device_maps.entry_for(name, device_map) for name in param_names}
    return {name: "cpu" if entry is None else device_map[entry] for name, entry in entries.items()}


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    checkpoint = workspace.larger(layers=12)
    reference = workspace.outputs(tiny.load(checkpoint, device=workspace.main), text_only=True)
    placement = {"": workspace.main, "model.language_model.layers.1": "disk"}
    folder = workspace.new_folder()
    model = tiny.load(checkpoint, device_map=placement, offload_folder=folder)
    wrong = [
        name
        for name, tensor in model.named_parameters()
        if tensor.is_meta != name.startswith("model.language_model.layers.1.")
    ]
    if wrong:
        return Outcome(True, f"{len(wrong)} parameters are not where the map puts them, {wrong[0]} among them")
    return Outcome.of_parity(workspace.difference(reference, model, text_only=True), "layer 1 of 12 on disk")
