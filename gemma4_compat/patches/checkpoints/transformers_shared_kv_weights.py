"""``save_pretrained`` writes the keys and values of KV-shared layers that the loaded checkpoint had.

Symptom: silent: the ``k_proj``, ``v_proj`` and ``k_norm`` weights of the KV-shared layers (E2B, E4B) are not in what
``save_pretrained`` writes. Servers refuse that checkpoint: ``Following weights were not initialized from checkpoint``
(vLLM), ``Missing 60 parameters`` (mlx-vlm), ``keyNotFound`` (mlx-swift).

Cause: KV-shared layers compute with the keys and values of earlier layers, so the model has no modules for their own.
On load their weights are silently dropped (``_keys_to_ignore_on_load_unexpected``). Other readers have the modules and
ask for the weights.

Fix: ``from_pretrained`` records where these weights are, and reads none. ``save_pretrained`` reads them there and
writes them in the dtype of the same layer's queries. If they can no longer be read, one warning names ``gemma4-compat
repair``. Quantized models are still saved without them, because other readers would take them for quantized weights.

Remove when: ``save_pretrained`` writes the weights of KV-shared layers, or no reader asks for them.
"""

from typing import Any

from gemma4_compat._gemma4.models import family, shared_weights
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F55",
    severity="wrong_result",
    affected=">=5.5.2",
    after="transformers-text-only-checkpoint transformers-save-tied-offloaded",
)


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._load_pretrained_model")
def load_pretrained_model(
    original: Original,
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = original(model, state_dict, checkpoint_files, *args, **kwargs)
    loads_adapter = len(args) > 1 or kwargs.get("expected_keys") is not None
    if not loads_adapter and family.is_gemma4(model):
        info = result[0]
        shared_weights.remember(model, info.unexpected_keys, None if state_dict is not None else checkpoint_files)
    return result


@PATCH.replaces("transformers.modeling_utils", "remove_tied_weights_from_state_dict")
def remove_tied_weights_from_state_dict(original: Original, state_dict: dict[str, Any], model: Any) -> dict[str, Any]:
    found: dict[str, Any] = original(state_dict, model)
    return shared_weights.added(model, found) if family.is_gemma4(model) else found


def reproduce(workspace: Workspace) -> Outcome:
    from safetensors.torch import load_file

    from gemma4_compat._lab import tiny, tiny_models

    workspace.needs("shared_keys_and_values")

    def _released(folder: Any) -> None:
        tiny_models.build_released(workspace.checkpoint, folder)

    released = workspace.cached(_released)
    model = tiny.load(released, device=workspace.main)
    folder = workspace.new_folder()
    model.save_pretrained(folder)
    expected, saved = (load_file(f"{file}/model.safetensors") for file in (released, folder))
    lost = sorted(expected.keys() - saved.keys())
    other = [name for name in expected.keys() & saved.keys() if not expected[name].equal(saved[name])]
    named = f", {lost[0]} among them" if lost else ""
    return Outcome(bool(lost or other), f"{len(lost)} of {len(expected)} tensors lost{named}, {len(other)} changed")
