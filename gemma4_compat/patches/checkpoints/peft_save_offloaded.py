"""An adapter whose file also contains the embedding or the head can be saved while these are offloaded.

Symptom: ``NotImplementedError: Cannot copy out of meta tensor; no data!`` from ``save_pretrained`` of a PEFT model
with a LoRA on ``embed_tokens`` or ``lm_head``, or with ``save_embedding_layers=True``, if one of the two is offloaded.

Cause: With such an adapter ``get_peft_model_state_dict`` also takes the base weights of embedding and head, from
``model.state_dict()``, where offloaded ones are on meta.

Fix: Offloaded weights in the adapter's state dict are read from where they are stored. The file is that of the same
model on one device.

Remove when: ``get_peft_model_state_dict`` reads offloaded weights through accelerate's hooks.
"""

from typing import Any

from gemma4_compat._offload.weights import state_loading
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F49", severity="crash", affected=">=0.18.0", acts_on="every model", requires="accelerate")


@PATCH.replaces("peft.utils.save_and_load", "get_peft_model_state_dict")
def get_peft_model_state_dict(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(model, *args, **kwargs)
    state_loading.fill(model, found)
    return found


def reproduce(workspace: Workspace) -> Outcome:
    from peft import PeftModel
    from safetensors.torch import load_file

    found: list[dict[str, Any]] = []
    for split in (False, True):
        base = workspace.load()
        model = PeftModel.from_pretrained(base, workspace.adapter_on("head", ["lm_head"]))
        if split:
            placement = workspace.device_map(base, "none")
            del placement["lm_head"]
            placement |= {f"lm_head.{name}": workspace.main for name, _ in base.lm_head.named_children()}
            pair = ("model.language_model.embed_tokens", "lm_head.base_layer")
            workspace.dispatch_map(base, placement | dict.fromkeys(pair, workspace.offloaded))
        folder = workspace.new_folder()
        model.save_pretrained(folder)
        found.append(load_file(f"{folder}/adapter_model.safetensors"))
    expected, saved = found
    other = [name for name in expected if name not in saved or not saved[name].equal(expected[name])]
    return Outcome(bool(other), f"{len(saved)} tensors, {len(other)} of them not those of one device")
