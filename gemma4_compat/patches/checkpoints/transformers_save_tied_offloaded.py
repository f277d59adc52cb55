"""``save_pretrained`` saves a tied weight once, wherever embedding and head are, and weights in their dtype.

Symptom: ``RuntimeError: Some tensors share memory`` from ``save_pretrained`` of a model with ``embed_tokens`` and
``lm_head`` both on the CPU. If only one of them is there, or on disk, the checkpoint has the weight twice. After
``model.to(torch.float32)`` or ``prepare_model_for_kbit_training``, the offloaded weights are still saved in bfloat16.
``AttributeError: `input_min` is not an nn.Parameter`` up to transformers 5.13.1, after a dispatch with
``offload_buffers=True``.

Cause: ``remove_tied_weights_from_state_dict`` recognizes tied weights by their memory. Offloaded ones are on meta,
where it compares the parameters instead, and accelerate gives each module its own parameter. So both are saved, and in
host memory they are the same tensor twice. ``load_offloaded_parameter`` returns a weight as stored: a change of dtype
only reaches the placeholder on meta, and accelerate converts the weight for every forward. Up to 5.13.1 each name on
meta is looked up among the parameters.

Fix: If a tied weight has an offloaded name and both have the same values, only its owner is saved. The checkpoint is
that of the same model on one device. An offloaded weight is saved in its parameter's dtype; the bytes of a quantized
one stay as they are. Offloaded buffers are not looked up, because no buffer is tied.

Remove when: ``save_pretrained`` recognizes offloaded tied weights by the model's ``all_tied_weights_keys``, and
``load_offloaded_parameter`` returns a weight in its parameter's dtype.
"""

from typing import Any

from gemma4_compat._offload import host_memory
from gemma4_compat._offload.weights import stored_weights, tied_pairs
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F49", severity="crash", affected=">=5.5", acts_on="every model", requires="accelerate")


@PATCH.replaces("transformers.modeling_utils", "remove_tied_weights_from_state_dict")
def remove_tied_weights_from_state_dict(original: Original, state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    pairs = getattr(model, "all_tied_weights_keys", None) or {}
    twice = [
        name
        for name, owner in pairs.items()
        if {name, owner} <= state_dict.keys()
        and "meta" in (state_dict[name].device.type, state_dict[owner].device.type)
        and tied_pairs.is_shared(model, name, owner)
    ]
    kept = {name: tensor for name, tensor in state_dict.items() if name not in twice}
    buffers = {name for name, buffer in model.named_buffers() if buffer.is_meta}
    if not buffers:
        return original(kept, model)  # type: ignore[no-any-return]
    found = original({name: tensor for name, tensor in kept.items() if name not in buffers}, model)
    return {name: found.get(name, tensor) for name, tensor in kept.items() if name in found or name in buffers}


@PATCH.replaces("transformers.integrations.accelerate", "load_offloaded_parameter", group="dtypes")
def load_offloaded_parameter(original: Original, model: Any, param_name: str) -> Any:
    stored = original(model, param_name)
    path, _, name = param_name.rpartition(".")
    parameter = stored_weights.holder(model.get_submodule(path), name).get(name)
    if parameter is None or not host_memory.is_plain(parameter):
        return stored
    return stored.to(parameter.dtype) if parameter.is_floating_point() and stored.is_floating_point() else stored


def reproduce(workspace: Workspace) -> Outcome:
    from safetensors.torch import load_file

    pair = ("model.language_model.embed_tokens", "lm_head")
    found: list[dict[str, Any]] = []
    for model in (workspace.load(), workspace.load_unmarked()):
        if found:
            model = workspace.dispatch(model, "none", *pair)
        folder = workspace.new_folder()
        model.save_pretrained(folder)
        found.append(load_file(f"{folder}/model.safetensors"))
    expected, saved = found
    if extra := sorted(saved.keys() ^ expected.keys()):
        return Outcome(True, f"the checkpoint has {len(saved)} tensors, not {len(expected)}: {', '.join(extra)}")
    other = [name for name, tensor in saved.items() if not tensor.equal(expected[name])]
    return Outcome(bool(other), f"{len(saved)} tensors, {len(other)} of them not those of one device")
