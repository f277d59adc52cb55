"""An offload folder that holds other weights, is gone or cannot be written raises one clear error.

Symptom: silent: a model dispatched with an ``offload_dir`` that already holds another model's weights computes with
those weights. When the folder is gone, a forward raises a bare ``FileNotFoundError`` on one ``.dat`` or
``.safetensors`` file.

Cause: ``dispatch_model`` writes nothing into a folder that has an ``index.json``, because the folder may have been
prepared. It does not check whether it was prepared from *these* weights. ``OffloadedWeightsLoader.__getitem__``
fails deep inside a forward and does not say what the file is for.

Fix: If the model still has the weights that belong on disk, they are first compared with the folder, byte by byte.
Equal weights are used and missing ones are added. A different weight raises one error, and nothing is moved.

An error about a folder that cannot be written names the folder; an error about a weight that cannot be read names the
folder and the weight. The model is usable again as soon as the folder is. A folder for which the map selects no weight
gets an empty index.

Remove when: ``dispatch_model`` compares or refuses an ``offload_dir`` that was written from other weights, and its
errors name the folder and the weight.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F27", kind="refusal", severity="wrong_result", affected=">=1.12", acts_on="every model")


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    folder, placement = given.get("offload_dir"), given["device_map"]
    if folder is not None and given.get("offload_index") is None and Path(folder, "index.json").is_file():
        weights = {
            name: tensor
            for name, tensor in given["model"].state_dict().items()
            if placement.get(device_maps.entry_for(name, placement)) == "disk" and tensor.device.type != "meta"
        }
        _complete(Path(folder), weights)
    return original(*args, **kwargs)


def _complete(folder: Path, weights: Mapping[str, Any]) -> None:
    """Add those of the weights that the folder lacks.

    Raises:
        Gemma4CompatError: the folder has different weights under the same names.
    """
    from accelerate.utils import OffloadedWeightsLoader, offload_state_dict

    there = OffloadedWeightsLoader(save_folder=str(folder))
    keys = set(there)
    for name in sorted(keys & weights.keys()):
        found, expected = there[name], weights[name]
        if not _equal(found, expected):
            raise Gemma4CompatError(
                f"the offload folder {str(folder)!r} holds another model's weights: {name!r} is "
                f"{found.dtype} {tuple(found.shape)} there, and not what this model has "
                f"({expected.dtype} {tuple(expected.shape)}). Nothing was moved. Give an empty folder as offload_dir."
            )
    offload_state_dict(str(folder), {name: tensor for name, tensor in weights.items() if name not in keys})


def _equal(first: Any, second: Any) -> bool:
    import torch

    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # Bytes, not numbers, because a NaN does not equal itself.
    first, second = (part.detach().cpu().contiguous().view(-1).view(torch.uint8) for part in (first, second))
    return bool(torch.equal(first, second))


@PATCH.replaces("accelerate.utils.offload", "offload_state_dict")
def offload_state_dict(original: Original, save_dir: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(save_dir, *args, **kwargs)
    except OSError as error:
        raise Gemma4CompatError(
            f"the offload folder {str(save_dir)!r} cannot be written: {error}. Nothing was moved. Give a folder that "
            "can be created or written, on a disk with room for the weights."
        ) from error
    index = Path(save_dir, "index.json")
    if not index.exists():  # no weights: a map entry that matches nothing, or only buffers
        index.write_text("{}", encoding="utf-8")


@PATCH.replaces("accelerate.utils.offload", "OffloadedWeightsLoader.__getitem__")
def getitem(original: Original, self: Any, key: str) -> Any:
    from safetensors import SafetensorError

    try:
        return original(self, key)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: numpy's error for a truncated file
        folder = Path(self.index[key].get("safetensors_file") or Path(self.save_folder, key)).parent
        raise Gemma4CompatError(
            f"the offloaded weight {key!r} cannot be read from the folder {str(folder)!r}: {error}. What is offloaded "
            "to disk is read for each forward, so the folder must stay as it is while the model is in use. Put it "
            "back and the model is usable again, or load the model again."
        ) from error


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny

    folder = workspace.new_folder()
    first = workspace.load()
    placement = tiny.device_map(first, "towers", main=workspace.main, offloaded="disk")
    tiny.dispatch(first, placement, folder)
    other = workspace.load()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    reference = workspace.outputs(other)
    try:
        tiny.dispatch(other, placement, folder)
    except Gemma4CompatError:
        return Outcome.of_parity(workspace.difference(reference, other), "refused, and the model as it was")
    return Outcome.of_parity(workspace.difference(reference, other), "an offload folder of another model")
