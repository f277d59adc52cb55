"""Checkpointing's ``offload`` and ``every_n_layers`` also count among its keyword arguments, and without a GPU.

Symptom: silent: ``model.gradient_checkpointing_enable({"use_reentrant": False, "offload": True})`` keeps every hidden
state on the GPU, and with ``"every_n_layers"`` there every layer is checkpointed. An E4B that trains on 32,768 tokens
takes 6.4 GiB more than you asked for. Trainer reads both keys from ``gradient_checkpointing_kwargs``; a training loop
of your own and ``peft.prepare_model_for_kbit_training`` pass them on unread. On a machine without an accelerator
``offload`` raises ``RuntimeError: pin_memory=True requires a CUDA or other accelerator backend``, in Trainer too.

Cause: The method hands the dictionary to ``torch.utils.checkpoint.checkpoint``, which hands unknown keys to the layer,
and the layer ignores them. Offloading asks for pinned memory, which PyTorch has only beside an accelerator.

Fix: The method takes both keys out, as Trainer does; an argument of the same name wins. Without an accelerator nothing
is offloaded: the activations are in host memory already. This holds for every model, because they share the method.

Remove when: transformers reads both keys in the method, and ``offload`` works without an accelerator.
"""

from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F112", severity="memory", affected=">=5.16.0", acts_on="every model")

OPTIONS = {"every_n_layers": 1, "offload": False}


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel.gradient_checkpointing_enable", affected="<5.23.0")
@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._activation_checkpointing_enable", affected=">=5.23.0")
def enable(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    import inspect

    import torch

    signature = inspect.signature(original)
    found = signature.bind(self, *args, **kwargs).arguments
    name = list(signature.parameters)[1]  # the dictionary, by release: of gradient or activation checkpointing
    asked = found.get(name)
    given = dict(asked or {})
    for option, default in OPTIONS.items():
        if option in signature.parameters and option in given:
            value = given.pop(option)
            if found.get(option, default) == default:
                found[option] = value
    if found.get("offload") and not torch.accelerator.is_available():
        found["offload"] = False
    # As Trainer does: a dictionary of nothing else stands for the defaults. An empty one is left as it is: PyTorch's.
    return original(**(found | {name: (given or None) if asked else asked}))


def reproduce(workspace: Workspace) -> Outcome:
    """How often attention runs in a step with every second layer checkpointed."""
    import inspect

    model = workspace.load().train()
    if "every_n_layers" not in inspect.signature(type(model)._set_gradient_checkpointing).parameters:
        return Outcome(False, "this release checkpoints every layer, and has no such option", 0.0)
    model.gradient_checkpointing_enable({"use_reentrant": False, "every_n_layers": 2})
    layers, runs = model.get_decoder().layers, []
    for layer in layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: runs.append(1))
    batch = workspace.inputs(text_only=True)
    model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
    again = len(runs) - len(layers)
    return Outcome(
        again == len(layers),
        f"every_n_layers=2 among the keyword arguments: {again} of {len(layers)} layers are computed again",
        0.0,
    )
