"""silent: an entry of ``device_map`` or ``llm_int8_skip_modules`` that matches nothing is ignored.

``model.multi_modal_projector`` is what most vision models call their projector; Gemma 4 has ``model.embed_vision`` and
``model.embed_audio``. So what should have been offloaded, or kept from being quantized, is not, and nothing says so.

Why: transformers looks up each module in the map and in the list, and never an entry among the modules.

Here: for Gemma 4 models, one warning that names the nearest modules. A map with a module that has no device, or with a
device that does not exist, is one error before anything is loaded, where transformers fails in the middle or at the
end of the load. So is a whole model on disk where transformers (before 5.13) cannot run one.

Goes when transformers says as much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import device_maps, family

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def get_device_map(original: Callable[..., Any], model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    # Upstream checks a map's completeness only when it has several devices; the model then stays where it was loaded.
    if isinstance(device_map, dict) and family.is_gemma4(model):
        device_maps.check(model, device_map)
        _refuse_whole_model_on_disk(device_map)
    return original(model, device_map, *args, **kwargs)


def _refuse_whole_model_on_disk(device_map: dict[str, Any]) -> None:
    version = versions.current("transformers")
    if set(device_map.values()) == {"disk"} and version is not None and versions.admits("<5.13", version):
        raise Gemma4CompatError(
            f"device_map puts the whole model on disk, which transformers {version} loads but cannot run. Keep one "
            "module elsewhere, for example {'': 'disk', 'lm_head': 'cpu'}, or use transformers 5.13 or newer."
        )


def get_modules_to_not_convert(
    original: Callable[..., Any], model: Any, skip_modules: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if skip_modules and family.is_gemma4(model):
        should_convert = vars(sys.modules["transformers.quantizers.quantizers_utils"])["should_convert_module"]
        device_maps.warn_unmatched_skips(model, skip_modules, lambda name, entry: not should_convert(name, [entry]))
    return original(model, skip_modules, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import tempfile
    import warnings

    from gemma4_compat._reproduction import tiny

    placement = {"": workspace.main, "model.multi_modal_projector": workspace.offloaded}
    said = []
    for quantization, device_map, skip in ((None, placement, []), ("4bit", None, ["model.multi_modal_projector"])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tiny.load(
                workspace.checkpoint,
                quantization,
                device=workspace.main,
                device_map=device_map,
                skip_modules=skip,
                offload_folder=tempfile.mkdtemp(dir=workspace.folder),
            )
        texts = [str(warning.message) for warning in caught if "multi_modal_projector" in str(warning.message)]
        said += [text for text in texts if "model.embed_vision" in text][:1]
    if len(said) == 2:
        return Outcome(False, f"one warning for each: {said[0]}")
    return Outcome(True, "entries that match nothing are ignored; what was meant is not named")


PATCH = Patch(
    id="transformers-placement-names",
    summary="device-map and skip-list entries that match no module are named, with what was probably meant",
    symptom="silent: entries of device_map and llm_int8_skip_modules that match no module (multi_modal_projector) are "
    "ignored",
    severity=Severity.MEMORY,
    failure_points=("F26",),
    distribution="transformers",
    affected=">=5.5",
    measured="5.23.0",
    requires=("accelerate",),
    retire_when="transformers names the nearest modules of an entry that matches none",
    targets=(
        Target(
            module="transformers.integrations.accelerate",
            name="_get_device_map",
            replacement=get_device_map,
            known={"b645e5f8c2f4": "5.5.0 - 5.15.1", "a6ba6440fdf4": "5.16.0 - 5.23.0"},
        ),
        Target(
            module="transformers.quantizers.base",
            name="HfQuantizer.get_modules_to_not_convert",
            replacement=get_modules_to_not_convert,
            known={"f6c1045161f1": "5.5.0 - 5.23.0"},
        ),
    ),
    reproduce=reproduce,
)
