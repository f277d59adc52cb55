"""Loading or creating an adapter leaves a dispatched base model where it is.

Symptom: silent: loading an adapter onto a model that is partly on the CPU or disk undoes that placement: on a card
with room the towers return to the GPU (E2B's shape: 6.03 -> 7.04 GiB). ``get_peft_model`` on such a model puts LoRA
weights on meta, where their values are lost. Under memory pressure or with disk maps the load raises ``TypeError``,
``RuntimeError`` (``Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu``),
``KeyError: 'base_model.model...'`` (from ``_update_offload``, peft <= 0.20), ``ValueError: We need an `offload_dir` to
dispatch this model according to this `device_map` `` or ``Cannot copy out of meta tensor``.

Cause: If ``hf_device_map`` has CPU or disk entries, ``PeftModel.from_pretrained`` removes accelerate's hooks.
``load_adapter`` then infers a new device map from the memory that is free at that moment, with the model already in
it, and dispatches everything again. New adapter layers are moved to ``base_layer.weight.device``, which is meta for
an offloaded layer between two forwards.

Fix: While PEFT loads, the patch hides the base's ``hf_device_map``, so hooks, map and every base tensor stay as they
are. The placement of the base takes precedence over ``device_map`` and ``max_memory`` given to PEFT, and one warning
says so. Adapter weights are placed on the device where their base layer computes.

A trainable copy (``modules_to_save``) is created from the real values and stays on that device. Adapters that read or
change the base weight (DoRA, PiSSA, ``target_parameters``, ``trainable_token_indices`` and most tuners other than
LoRA) find it on that device: it is onloaded while they are created, and for the whole forward of their layer. What is
written into it meanwhile is kept, and a weight tied to it also gets it.

Two configurations are refused before any layer is created: an adapter folder that has a config but no weights, and
trained biases (``bias=...``) of offloaded modules.

Remove when: PEFT keeps the hooks and the ``hf_device_map`` of a dispatched base model, and loads an adapter without
dispatching it again.
"""

import functools
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import json_files, notice
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate.module_hooks import hidden_map, map_owner
from gemma4_compat._offload.weights import peft_layers
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F3 F13 F16 F27 F38 F42 F133",
    severity="wrong_result",
    affected=">=0.18.0",
    acts_on="every model",
    bug="issues/3169 issues/2541",
)

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_PLACEMENT_ARGUMENTS = ("device_map", "max_memory", "offload_folder", "offload_dir", "offload_index")


@PATCH.replaces("peft.peft_model", "PeftModel.from_pretrained")
@PATCH.replaces("peft.mixed_model", "PeftMixedModel.from_pretrained")
def from_pretrained(original: Original, cls: Any, model: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_folder_without_weights(model_id, kwargs.get("subfolder"))
    kwargs = _without_placement(model, kwargs)
    with hidden_map(model):
        return original(cls, model, model_id, *args, **kwargs)


@PATCH.replaces("peft.peft_model", "PeftModel.load_adapter")
def load_adapter(original: Original, self: Any, model_id: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse_folder_without_weights(model_id, kwargs.get("subfolder"))
    kwargs = _without_placement(self, kwargs)
    with hidden_map(self):
        return original(self, model_id, *args, **kwargs)


def _refuse_folder_without_weights(model_id: Any, subfolder: str | None) -> None:
    """Check before the base model is touched; upstream would treat the folder as a hub id and report that instead."""
    folder = Path(model_id, subfolder or "")
    config = folder / "adapter_config.json"
    if not config.is_file() or any((folder / name).is_file() for name in _WEIGHTS):
        return
    if json_files.settings(config).get("peft_type") != "XLORA":  # its files have other names
        raise _caught_as_upstream()(
            f"the adapter folder {str(folder)!r} has an adapter_config.json but no weights ({' or '.join(_WEIGHTS)}). "
            "Was the save interrupted, or the file not downloaded? Copy it there, or give another folder."
        )


@functools.cache
def _caught_as_upstream() -> type[Gemma4CompatError]:
    """An error class that is caught like those which upstream raises there."""
    from huggingface_hub.errors import HFValidationError

    class MissingWeightsError(Gemma4CompatError, HFValidationError, OSError):  # type: ignore[misc]
        pass

    return MissingWeightsError


def _without_placement(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """``kwargs`` without placement arguments if the base is already placed, with a warning if that could surprise."""
    owner = map_owner(model)
    if owner is None:
        return kwargs
    ignored = [name for name in ("device_map", "max_memory") if kwargs.get(name) is not None]
    if ignored and kwargs.get("device_map") != owner.hf_device_map:  # PEFT's Auto classes give both the same map
        notice.warn_user(
            f"{' and '.join(ignored)} given to PEFT is ignored: the base model is already dispatched and its "
            f"placement ({len(owner.hf_device_map)} entries in hf_device_map) wins. To place it differently, load the "
            "base model with another device_map."
        )
    return {name: value for name, value in kwargs.items() if name not in _PLACEMENT_ARGUMENTS}


def reproduce(workspace: Workspace) -> Outcome:
    from peft import LoraConfig, PeftModel, get_peft_model

    from gemma4_compat._lab import tiny_adapters

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
    found = workspace.difference(reference, model)
    fresh = get_peft_model(workspace.split(), LoraConfig(target_modules=tiny_adapters.TARGETS["language"]))
    lost = [name for name, parameter in fresh.named_parameters() if "lora_" in name and parameter.is_meta]
    if lost:
        return Outcome(True, f"get_peft_model puts {len(lost)} LoRA weights on meta")
    return Outcome.of_parity(found, f"adapter on a split base, its {len(placement)} map entries kept")


PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")(peft_layers.inject_adapter)
PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner._replace_module")(peft_layers.replace_module)
PATCH.replaces("peft.tuners.lora.model", "LoraModel._replace_module")(peft_layers.replace_module)
PATCH.replaces("peft.tuners.hira.model", "HiraModel._replace_module", optional=True)(peft_layers.replace_module)
PATCH.replaces("peft.tuners.mixed.model", "MixedModel._replace_module")(peft_layers.replace_module)
PATCH.replaces("peft.tuners.tuners_utils", "BaseTunerLayer._move_adapter_to_device_of_base_layer")(
    peft_layers.move_adapter_to_device_of_base_layer
)
PATCH.replaces("peft.tuners.lora.layer", "ParamWrapper._move_adapter_to_device_of_base_layer")(
    peft_layers.move_adapter_to_device_of_base_layer
)
PATCH.replaces("peft.utils.other", "ModulesToSaveWrapper.update")(peft_layers.modules_to_save_update)
PATCH.replaces("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer.update_layer")(
    peft_layers.trainable_tokens_update_layer
)
PATCH.replaces("peft.utils.other", "TrainableTokensWrapper._forward_wrapped_mixed_batch")(
    peft_layers.trainable_tokens_mixed_batch
)
