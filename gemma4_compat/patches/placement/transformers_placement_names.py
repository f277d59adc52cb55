"""Device-map and skip-list entries that match no module are reported, with the likely intended names.

Symptom: silent: an entry of ``device_map`` or ``llm_int8_skip_modules`` that matches no module is ignored. For
example, most vision models call their projector ``model.multi_modal_projector``; Gemma 4 has ``model.embed_vision``
and ``model.embed_audio``. Modules are then not offloaded, or not kept from being quantized, and nothing says so. The
same goes for ``vision_tower`` in that list, without ``model.``.

Cause: transformers looks up each module in the map (``_get_device_map``) and in the list
(``HfQuantizer.get_modules_to_not_convert``). It never looks up an entry among the modules. An entry of the list
matches the start or the end of a path: ``vision_tower`` is the end of the tower's, not of those of its linear layers.

Fix: For Gemma 4 models, one warning names the nearest modules, another the full paths of modules whose linear layers
would still be quantized. A map that has no device for a module, or names a device that does not exist, raises one
error before anything is loaded; transformers fails in the middle or at the end of the load. A whole model on disk also
raises one if transformers (before 5.13) cannot run it. A map that keeps more in host memory than is available gives
one warning with both figures before anything is loaded.

Remove when: transformers names the nearest modules of an entry that matches none.
"""

import sys
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.models import family
from gemma4_compat._offload import host_room
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F26", kind="notice", severity="memory", affected=">=5.5", requires="accelerate")


@PATCH.replaces("transformers.integrations.accelerate", "_get_device_map")
def get_device_map(original: Original, model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    # Upstream checks a map's completeness only if it has several devices; otherwise the model stays where it was
    # loaded.
    ours = family.has_parts(model)
    if isinstance(device_map, dict) and ours:
        device_maps.check(model, device_map)
        _refuse_whole_model_on_disk(device_map)
    found = original(model, device_map, *args, **kwargs)
    if isinstance(found, dict) and ours:
        host_room.warn_if_short(model, found)
    return found


def _refuse_whole_model_on_disk(device_map: dict[str, Any]) -> None:
    version = versions.current("transformers")
    if set(device_map.values()) == {"disk"} and version is not None and versions.admits("<5.13", version):
        raise Gemma4CompatError(
            f"device_map puts the whole model on disk, which transformers {version} loads but cannot run. Keep one "
            "module elsewhere, for example {'': 'disk', 'lm_head': 'cpu'}, or use transformers 5.13 or newer."
        )


@PATCH.replaces("transformers.quantizers.base", "HfQuantizer.get_modules_to_not_convert")
def get_modules_to_not_convert(
    original: Original, model: Any, skip_modules: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if skip_modules and family.has_parts(model):
        should_convert = vars(sys.modules["transformers.quantizers.quantizers_utils"])["should_convert_module"]
        device_maps.warn_unmatched_skips(model, skip_modules, lambda name, entry: not should_convert(name, [entry]))
    return original(model, skip_modules, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import warnings

    from gemma4_compat._lab import tiny

    placement = {"": workspace.main, "model.multi_modal_projector": workspace.offloaded}
    warned = []
    for quantization, device_map, skip in ((None, placement, []), ("4bit", None, ["model.multi_modal_projector"])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tiny.load(
                workspace.checkpoint,
                quantization,
                device=workspace.main,
                device_map=device_map,
                skip_modules=skip,
                offload_folder=workspace.new_folder(),
            )
        texts = [str(warning.message) for warning in caught if "multi_modal_projector" in str(warning.message)]
        warned += [text for text in texts if "model.embed_vision" in text][:1]
    if len(warned) == 2:
        return Outcome(False, f"one warning for each: {warned[0]}")
    return Outcome(True, "entries that match nothing are ignored; what was meant is not named")
