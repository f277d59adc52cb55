"""KV-shared layers find the keys and values of earlier layers on models over several devices and under FSDP.

Symptom: ``KeyError: 13`` (or ``22``, ``'sliding_attention'``) in ``Gemma4TextAttention.forward``, where a KV-shared
layer reads the keys and values of an earlier layer. With ``gemma4_unified`` (the 12B), ``KeyError:
'sliding_attention'`` in ``Gemma4UnifiedTextAttention.forward``, or in the assistant model: the model returns an
empty container instead of the keys and values that the assistant needs.

Cause: ``Gemma4TextModel.forward`` creates a dict (5.9.0: a ``UserDict``) and passes it to each layer as an argument.
One layer writes to it and later layers read from it. accelerate's hooks rebuild every mapping among the arguments
unless a skip key names it. So ``dispatch_model`` without ``skip_keys``, or with a list that lacks this key, loses what
was written. transformers 5.5.2 lacks the key in its own list, and passes the dict by position, where no skip key
applies. FSDP, and FSDP2 with ``cast_forward_inputs``, rebuild every plain dict (up to 5.8.1).

``gemma4_unified`` has a copy of these classes in its own module, and imports nothing from ``gemma4``. The two modules
are separate groups of targets, so that patching one does not wait for the other.

Fix: If a hook or a wrapper sits between the text model and the attention of a layer, the layer gets the same
container in a type that accelerate, FSDP and FSDP2 all pass on unchanged: writes and reads still reach the original.
The text model keeps its own container and returns it as before. Without a hook or a wrapper nothing changes. Outputs
are bit-exact.

Remove when: no supported release hands a rebuilt container to its layers, that is, when transformers below 5.23.0 is
no longer supported: 5.23.0 has a container that hooks pass on unchanged.
"""

from typing import Any

from gemma4_compat._gemma4.cache import shared_kv
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F5 F30 F33", severity="crash", affected=">=5.5.2,<5.23.0", bug="issues/45663", applied_upstream="pull/47290"
)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextDecoderLayer.__call__", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedTextDecoderLayer.__call__", group="gemma4_unified")
def decoder_layer(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return shared_kv.decoder_layer(original, self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import scenarios

    return scenarios.of_both_classes(workspace, gemma4=_gemma4, unified=lambda _: _unified(workspace))


def _gemma4(workspace: Workspace) -> Outcome:
    from accelerate import dispatch_model

    reference = workspace.reference()
    model = workspace.load()
    model = dispatch_model(model, workspace.device_map(model), offload_dir=workspace.new_folder())
    return Outcome.of_parity(workspace.difference(reference, model), "dispatch_model without skip_keys")


def _unified(workspace: Workspace) -> Outcome:
    from accelerate import dispatch_model

    from gemma4_compat._lab import tiny_models
    from gemma4_compat._lab.scenarios import promised_states

    model = workspace.load_text() if workspace.variant else tiny_models.unified_text_model().to(workspace.main)
    reference = workspace.outputs(model, text_only=True)
    promised = promised_states(model, workspace.inputs(text_only=True))
    placement = dict.fromkeys((f"model.{name}" for name, _ in model.model.named_children()), workspace.main)
    del placement["model.layers"]
    placement |= {f"model.layers.{index}": workspace.main for index in range(len(model.model.layers))}
    away = (0, 2, len(model.model.layers) - 1)
    placement |= {f"model.layers.{index}": workspace.offloaded for index in away} | {"lm_head": workspace.main}
    model = dispatch_model(model, placement, offload_dir=workspace.new_folder())
    found = workspace.difference(reference, model, text_only=True)
    returned = promised_states(model, workspace.inputs(text_only=True))
    if returned != promised:
        return Outcome(True, f"KeyError: '{promised[0]}' awaits an assistant, which is given {returned}")
    return Outcome.of_parity(found, "dispatch_model without skip_keys")


PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.forward", group="gemma4")(shared_kv.text_model)
PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedTextModel.forward", group="gemma4_unified")(shared_kv.text_model)
