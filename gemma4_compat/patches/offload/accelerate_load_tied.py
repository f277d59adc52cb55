"""``load_checkpoint_and_dispatch`` loads a tied weight under each of its names.

Symptom: ``KeyError: "'lm_head.weight'"`` in the first forward of a model that ``load_checkpoint_and_dispatch`` loaded
with the embedding and its tied head on disk, or with everything there. With only the embedding on disk, ``ValueError:
weight is on the meta device``. With another ``dtype`` than the model was built with, ``RuntimeError: expected m1 and
m2 to have the same dtype``. If the model was built with weights, nothing is raised, but its embedding stays random.

Cause: A checkpoint holds a tied weight once, under the name of the embedding. ``load_checkpoint_in_model`` writes it
to the offload folder only under that name. In memory it ties the weight again after the load, to the first of its
names that is in memory: the head, which still has its old values.

Fix: Before the load, tied weights are on meta, as ``init_empty_weights`` leaves them, so they are tied to the loaded
weight. After it, each name that is on disk has a file (a hard link if the file system allows one) and an entry in the
folder's index. A name that is not on disk gets the value. All have the requested dtype. A weight that the checkpoint
lacks is not changed.

Remove when: ``load_checkpoint_in_model`` loads a tied weight under all its names.
"""

import inspect
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F65 F15",
    severity="crash",
    affected=">=1.12",
    acts_on="every model",
    needs="transformers-offloaded-embedding accelerate-tied-on-disk",
)


@PATCH.replaces("accelerate.utils.modeling", "load_checkpoint_in_model")
def load_checkpoint_in_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    from accelerate.utils import find_tied_parameters

    given = inspect.signature(original).bind(*args, **kwargs).arguments
    model, placement, folder = given["model"], given.get("device_map"), given.get("offload_folder")
    if not isinstance(placement, Mapping):
        return original(*args, **kwargs)
    groups = find_tied_parameters(model)  # the load unties them
    before = [_empty(model, names) for names in groups]
    try:
        result = original(*args, **kwargs)
        on_disk = [folder is not None and _complete(model, names, placement, Path(folder)) for names in groups]
    except BaseException:
        on_disk = [False] * len(groups)
        raise
    finally:
        for names, weight, complete in zip(groups, before, on_disk):
            if not complete:
                _restore(model, names, weight)
    return result


def _empty(model: Any, names: list[str]) -> Any:
    """Put a tied weight on meta; returns its old value."""
    import torch

    weight = model.get_parameter(names[0])
    if type(weight) is torch.nn.Parameter and weight.device.type != "meta":
        empty = torch.nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
        _tie(model, names, empty)
    return weight


def _restore(model: Any, names: list[str], weight: Any) -> None:
    if all(model.get_parameter(name).device.type == "meta" for name in names):
        _tie(model, names, weight)


def _tie(model: Any, names: list[str], weight: Any) -> None:
    for name in names:
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._parameters[attribute] = weight


def _complete(model: Any, names: list[str], placement: Mapping[str, Any], folder: Path) -> bool:
    """Give every name of one tied weight a file if it is on disk, else a value; False if no name is on disk."""
    import json

    from accelerate.utils import load_offloaded_weight, set_module_tensor_to_device

    from gemma4_compat._engine.io import json_files

    file = folder / "index.json"
    index = json_files.settings(file) if file.is_file() else {}
    devices = {name: placement.get(device_maps.entry_for(name, placement) or "") for name in names}
    loaded = next((name for name in names if devices[name] == "disk" and name in index), None)
    if loaded is None:
        return False
    source, dtype = folder / f"{loaded}.dat", model.get_parameter(loaded).dtype
    for name in names:
        if name == loaded:
            continue
        if devices[name] == "disk":
            _link(source, folder / f"{name}.dat")
            index[name] = index[loaded]
            set_module_tensor_to_device(model, name, "meta", dtype=dtype)
        elif model.get_parameter(name).device.type == "meta":
            value = load_offloaded_weight(str(source), index[loaded])
            set_module_tensor_to_device(model, name, devices[name], value=value, dtype=dtype)
    file.write_text(json.dumps(index, indent=2), encoding="utf-8")
    return True


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from accelerate import load_checkpoint_and_dispatch

    from gemma4_compat._lab import tiny, tiny_models

    embedding, head = "model.language_model.embed_tokens", "lm_head"
    found = []
    for offloaded in ((), (embedding, head), (embedding,)):
        try:
            model = tiny_models.empty_model(workspace.checkpoint, torch.bfloat16)
        except LookupError as error:
            return Outcome(False, str(error), applicable=False)
        placement = tiny.device_map(model, "none", main=workspace.main, offloaded="disk")
        placement |= dict.fromkeys(offloaded, "disk")
        folder = workspace.new_folder()
        load_checkpoint_and_dispatch(model, str(workspace.checkpoint), device_map=placement, offload_folder=folder)
        found.append(workspace.outputs(model.eval(), text_only=True))
    worst = max(workspace.difference(found[0], outputs) for outputs in found[1:])
    return Outcome.of_parity(worst, "load_checkpoint_and_dispatch with a tied embedding on disk")
