"""Under DeepSpeed's ZeRO-3 a model gets the buffers of its checkpoint.

Symptom: silent: under ZeRO-3 ``from_pretrained`` reports ``layer_scalar``, ``input_max``, ``output_min`` and similar
buffers as ``MISSING``, and leaves them at their defaults, so outputs and loss are wrong.

Cause: ``_load_state_dict_into_zero3_model`` handles the parameters of a module, but not its buffers. Each decoder
layer of a Gemma 4 multiplies its output by a buffer, and the towers clip by buffers.

Fix: Buffers are copied from the checkpoint after the parameters, as upstream does it from 5.6.0 on. ZeRO-3 does not
partition them, so each process has its own.

Remove when: transformers below 5.6.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F62", severity="wrong_result", affected=">=5.5,<5.6", bug="issues/45397", applied_upstream="pull/45402")


@PATCH.replaces("transformers.modeling_utils", "_load_state_dict_into_zero3_model")
def load_state_dict(
    original: Original,
    model_to_load: Any,
    state_dict: Any,
    load_config: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    errors, missing = original(model_to_load, state_dict, load_config, *args, **kwargs)
    if family.is_gemma4(model_to_load):
        mapping = getattr(load_config, "weight_mapping", None)
        for name in _load_buffers(model_to_load, state_dict, mapping):
            missing.discard(name)
    return errors, missing


def _load_buffers(model: Any, state_dict: Any, mapping: Any) -> list[str]:
    """Copy the values of buffers from a checkpoint's tensors, with upstream's names; returns the buffers' names."""
    import torch
    from transformers.integrations import deepspeed

    buffers = dict(model.named_buffers())
    last = {name.rpartition(".")[2] for name in buffers}
    values = {name: value for name, value in state_dict.items() if name.rpartition(".")[2] in last}
    if mapping:
        values = deepspeed._apply_weight_conversions_to_state_dict(model, values, mapping)
    loaded = []
    for name, value in values.items():
        outer = f"{model.base_model_prefix}.{name}"  # a checkpoint of the inner model
        key = outer if outer in buffers else name
        if key in buffers:
            with torch.no_grad():
                buffers[key].copy_(value)
            buffers[key]._is_hf_initialized = True
            loaded.append(key)
    return loaded


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    import transformers

    from gemma4_compat._lab import tiny_models
    from gemma4_compat._lab.stand_ins import zero3

    right = workspace.load()
    kind = getattr(transformers, tiny_models.class_name(workspace.checkpoint))
    with zero3.standing_in():  # it accepts no device map
        found = kind.from_pretrained(workspace.checkpoint, dtype=torch.bfloat16).to(workspace.main).eval()
    pairs = [
        (name, one, other.to(one.device))
        for (name, one), (_, other) in zip(right.named_buffers(), found.named_buffers(), strict=True)
    ]
    lost = [name for name, one, other in pairs if not torch.equal(one, other)]
    parity = workspace.difference(workspace.reference(), found)
    detail = f"{len(lost)} of {len(pairs)} buffers are not those of the checkpoint; logits differ by {parity:.3g}"
    return Outcome(bool(lost) or parity > 0, detail, parity)
