"""Audio input works in a model whose audio tower computes in another dtype than the token embedding.

Symptom: ``RuntimeError: masked_scatter: expected self and source to have same dtypes but got Float and Half`` for a
prompt with audio, when the audio tower computes in another dtype than the token embedding. Examples are a model with
float16 towers and a float32 language model, as used on GPUs without bfloat16, and a float32 model under
``torch.autocast``.

Cause: ``Gemma4Model.forward`` casts image and video features to the dtype of the embeddings they are inserted into.
It only moves audio features to the device of those embeddings.

Fix: ``Gemma4Model.get_audio_features`` returns the features in the dtype of the token embedding. Features that already
have this dtype, tuple outputs (``return_dict=False``) and embeddings of an integer dtype are not changed.

Remove when: transformers below 5.15.0 is no longer supported.
"""

from typing import Any

from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F25", severity="crash", affected=">=5.5.0,<5.15.0", bug="issues/47672", applied_upstream="pull/47482")


@PATCH.replaces(MODELING_GEMMA4, "Gemma4Model.get_audio_features")
def get_audio_features(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(self, *args, **kwargs)
    features, dtype = getattr(found, "pooler_output", None), self.get_input_embeddings().weight.dtype
    if features is not None and features.dtype != dtype and dtype.is_floating_point:
        found.pooler_output = features.to(dtype)
    return found


def reproduce(workspace: Workspace) -> Outcome:
    import contextlib

    import torch

    from gemma4_compat._lab import tiny

    workspace.needs("audio_tower")
    model = tiny.load(workspace.checkpoint, device=workspace.main, dtype=torch.float32)
    autocast = torch.autocast(torch.device(workspace.main).type, dtype=torch.bfloat16)
    tower, bridge = model.model.audio_tower, model.model.embed_audio
    found = []
    for way in (autocast, contextlib.nullcontext()):
        with way:
            # What a user would do: cast what goes into the prompt.
            hook = bridge.register_forward_hook(lambda _module, _args, features: features.float())
            reference = workspace.outputs(model)
            hook.remove()
            found.append(workspace.difference(reference, model))
        tower.half()
        bridge.half()
    return Outcome.of_parity(max(found), "bfloat16 autocast, and float16 towers under a float32 language model")
