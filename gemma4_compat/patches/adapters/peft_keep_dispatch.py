"""silent: loading an adapter onto a model that is partly on the CPU or disk undoes that placement.

On a card with room the towers come back to the GPU (E2B's shape: 6.03 -> 7.04 GiB); under memory pressure the load
dies with one of several errors (F1, F2, ``Expected all tensors to be on the same device``), with disk maps in
``KeyError: 'base_model.model...'`` (``_update_offload``, peft <= 0.20) or ``Cannot copy out of meta tensor``. And
``get_peft_model`` on such a model puts LoRA weights on meta, where their values are lost.

Why: ``PeftModel.from_pretrained`` removes accelerate's hooks, and ``load_adapter`` infers a new device map from the
memory that is free *now*, with the model already in it, and dispatches everything again. All that because
``hf_device_map`` has CPU or disk entries. New adapter layers are moved to ``base_layer.weight.device``, which is meta
for an offloaded layer between two forwards (F13).

Here: while PEFT loads, the base's ``hf_device_map`` is out of sight, so hooks, map and every base tensor stay as they
are; the base's placement wins over ``device_map`` and ``max_memory`` given to PEFT, and one notice says so. Adapter
weights go to the device where their base layer computes. A trainable copy (``modules_to_save``) is made of the real
values and stays on that device (all this in ``peft_layers.py``). Adapters that read or change the base weight
(DoRA, PiSSA, target_parameters and most tuners other than LoRA) find it there: it is brought in while they are made,
and for the whole of their layer's forward.

Goes when PEFT loads an adapter onto a dispatched model without dispatching it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._models import placement as _placement
from gemma4_compat._offload import peft_layers

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PLACEMENT_ARGUMENTS = ("device_map", "max_memory", "offload_folder", "offload_dir", "offload_index")


def from_pretrained(
    original: Callable[..., Any], cls: Any, model: Any, model_id: Any, *args: Any, **kwargs: Any
) -> Any:
    _refuse_folder_without_weights(model_id, kwargs.get("subfolder"))
    kwargs = _without_placement(model, kwargs)
    with _placement.hidden_map(model):
        return original(cls, model, model_id, *args, **kwargs)


def load_adapter(original: Callable[..., Any], self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_folder_without_weights(model_id, kwargs.get("subfolder"))
    kwargs = _without_placement(self, kwargs)
    with _placement.hidden_map(self):
        return original(self, model_id, *args, **kwargs)


def _refuse_folder_without_weights(model_id: Any, subfolder: str | None) -> None:
    """Before the base model is touched; upstream would take the folder for a name on the hub, and complain of that."""
    import json

    folder = Path(model_id, subfolder or "")
    config = folder / "adapter_config.json"
    if not config.is_file() or any((folder / name).is_file() for name in _WEIGHTS):
        return
    if json.loads(config.read_text(encoding="utf-8")).get("peft_type") != "XLORA":  # it has files of other names
        raise Gemma4CompatError(
            f"the adapter folder {str(folder)!r} has an adapter_config.json but no weights ({' or '.join(_WEIGHTS)}). "
            "Was the save interrupted, or the file not downloaded? Copy it there, or give another folder."
        )


def _without_placement(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` less those about placement when the base has one, with a notice where that could surprise."""
    owner = _placement.map_owner(model)
    if owner is None:
        return kwargs
    ignored = [name for name in ("device_map", "max_memory") if kwargs.get(name) is not None]
    if ignored:
        warnings.warn(
            f"{' and '.join(ignored)} given to PEFT is ignored: the base model is already dispatched and its "
            f"placement ({len(owner.hf_device_map)} entries in hf_device_map) wins. To place it differently, load the "
            "base model with another device_map.",
            Gemma4CompatWarning,
            stacklevel=4,
        )
    return {name: value for name, value in kwargs.items() if name not in _PLACEMENT_ARGUMENTS}


def reproduce(workspace: Workspace) -> Outcome:
    from peft import LoraConfig, PeftModel, get_peft_model

    from gemma4_compat._reproduction import tiny_adapters
    from gemma4_compat._reproduction.workspace import difference

    reference = workspace.outputs(PeftModel.from_pretrained(workspace.load(), workspace.adapter("all")))
    base = workspace.split()
    placement = dict(base.hf_device_map)
    devices = {name: parameter.device for name, parameter in base.named_parameters()}
    model = PeftModel.from_pretrained(base, workspace.adapter("all"))
    if model.hf_device_map != placement:
        return Outcome(True, f"hf_device_map of {len(placement)} entries became {model.hf_device_map}")
    moved = [
        name
        for name, parameter in model.get_base_model().named_parameters()
        if "lora_" not in name and parameter.device != devices[name.replace(".base_layer", "")]
    ]
    if moved:
        return Outcome(True, f"{len(moved)} base tensors moved, {moved[0]} among them")
    found = difference(reference, workspace.outputs(model))
    fresh = get_peft_model(workspace.split(), LoraConfig(target_modules=tiny_adapters.TARGETS["language"]))
    lost = [
        name for name, parameter in fresh.named_parameters() if "lora_" in name and parameter.device.type == "meta"
    ]
    if lost:
        return Outcome(True, f"get_peft_model puts {len(lost)} LoRA weights on meta")
    return Outcome.of_parity(found, f"adapter on a split base, its {len(placement)} map entries kept")


_UTILS = "peft.tuners.tuners_utils"

PATCH = Patch(
    id="peft-keep-dispatch",
    summary="loading or creating an adapter leaves a dispatched base model where it is",
    symptom="silent: modules placed on the CPU or disk go back to the GPU, LoRA weights on meta lose their values; "
    "under memory pressure or with disk maps TypeError, KeyError or RuntimeError",
    severity=Severity.WRONG_RESULT,
    failure_points=("F3", "F13", "F16", "F27"),
    distribution="peft",
    affected=">=0.18.0",
    measured="0.21.2",
    bug=("https://github.com/huggingface/peft/issues/3169", "https://github.com/huggingface/peft/issues/2541"),
    retire_when="PEFT keeps the hooks and the hf_device_map of a dispatched base model",
    targets=(
        Target(
            module="peft.peft_model",
            name="PeftModel.from_pretrained",
            replacement=from_pretrained,
            known={
                "c474e5d52050": "0.18.0 - 0.18.1",
                "cad08ee23da9": "0.19.0 - 0.19.1",
                "46a16ffc232a": "0.20.0",
                "77634d2091c5": "0.21.0 - 0.21.2",
            },
        ),
        Target(
            module="peft.peft_model",
            name="PeftModel.load_adapter",
            replacement=load_adapter,
            known={
                "10467b22bfc0": "0.18.0 - 0.18.1",
                "8a3cd563ebdd": "0.19.0 - 0.19.1",
                "8b1eb29f9e9e": "0.20.0",
                "05baac2ad608": "0.21.0 - 0.21.2",
            },
        ),
        Target(
            module="peft.mixed_model",
            name="PeftMixedModel.from_pretrained",
            replacement=from_pretrained,
            known={"433c30911379": "0.18.0 - 0.21.2"},
        ),
        Target(
            module=_UTILS,
            name="BaseTuner.inject_adapter",
            replacement=peft_layers.inject_adapter,
            known={
                "68bd72181f68": "0.18.0 - 0.18.1",
                "4667223f092b": "0.19.0 - 0.20.0",
                "dab4e0770653": "0.21.0 - 0.21.2",
            },
        ),
        Target(
            module=_UTILS,
            name="BaseTuner._replace_module",
            replacement=peft_layers.replace_module,
            known={"1693b5cc40b5": "0.18.0 - 0.21.2"},
        ),
        Target(
            module="peft.tuners.lora.model",
            name="LoraModel._replace_module",
            replacement=peft_layers.replace_module,
            known={"d1c767eac651": "0.18.0 - 0.21.2"},
        ),
        Target(
            module="peft.tuners.hira.model",
            name="HiraModel._replace_module",
            replacement=peft_layers.replace_module,
            known={"d1c767eac651": "0.20.0 - 0.21.2"},
            optional=True,
        ),
        Target(
            module="peft.tuners.mixed.model",
            name="MixedModel._replace_module",
            replacement=peft_layers.replace_module,
            known={"387767e59b67": "0.18.0 - 0.18.1", "cf55f403b58b": "0.19.0 - 0.21.2"},
        ),
        Target(
            module=_UTILS,
            name="BaseTunerLayer._move_adapter_to_device_of_base_layer",
            replacement=peft_layers.move_adapter_to_device_of_base_layer,
            known={
                "fbf1855a34e3": "0.18.0 - 0.18.1",
                "3c8a7a04f2f1": "0.19.0 - 0.20.0",
                "e3dad162cb64": "0.21.0 - 0.21.2",
            },
        ),
        Target(
            module="peft.tuners.lora.layer",
            name="ParamWrapper._move_adapter_to_device_of_base_layer",
            replacement=peft_layers.move_adapter_to_device_of_base_layer,
            known={"b9ed98e42be5": "0.18.0 - 0.21.2"},
        ),
        Target(
            module="peft.utils.other",
            name="ModulesToSaveWrapper.update",
            replacement=peft_layers.modules_to_save_update,
            known={"5bcb364e17f5": "0.18.0 - 0.18.1", "0390ab5bdbd2": "0.19.0 - 0.21.2"},
        ),
    ),
    reproduce=reproduce,
)
