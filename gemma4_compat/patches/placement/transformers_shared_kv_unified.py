"""``KeyError: 'sliding_attention'`` in ``Gemma4UnifiedTextAttention.forward``, or in the assistant model that was
promised the keys and values of a ``gemma4_unified`` model (the 12B), which come back as an empty container.

Why: as in ``transformers_shared_kv.py``. ``gemma4_unified`` has a copy of those classes in a module of its own, and
imports nothing from ``gemma4``, so a patch of the one would wait for the other.

Here: as there.

Goes when no supported release hands a rebuilt container to its layers: 5.23.0 has one of the safe kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import shared_kv

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def decoder_layer(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return shared_kv.decoder_layer(original, self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import tempfile

    from accelerate import dispatch_model

    from gemma4_compat._reproduction import tiny_models
    from gemma4_compat._reproduction.scenarios import promised_states
    from gemma4_compat._reproduction.workspace import difference

    workspace.needs("unified")
    try:
        model = workspace.load_text() if workspace.variant else tiny_models.unified_text_model().to(workspace.main)
    except ImportError:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    reference = workspace.outputs(model, text_only=True)
    promised = promised_states(model, workspace.inputs(text_only=True))
    placement = dict.fromkeys((f"model.{name}" for name, _ in model.model.named_children()), workspace.main)
    del placement["model.layers"]
    placement |= {f"model.layers.{index}": workspace.main for index in range(len(model.model.layers))}
    away = (0, 2, len(model.model.layers) - 1)
    placement |= {f"model.layers.{index}": workspace.offloaded for index in away} | {"lm_head": workspace.main}
    model = dispatch_model(model, placement, offload_dir=tempfile.mkdtemp(dir=workspace.folder))
    found = difference(reference, workspace.outputs(model, text_only=True))
    returned = promised_states(model, workspace.inputs(text_only=True))
    if returned != promised:
        return Outcome(True, f"KeyError: '{promised[0]}' awaits an assistant, which is given {returned}")
    return Outcome.of_parity(found, "dispatch_model without skip_keys")


_UNIFIED = "transformers.models.gemma4_unified.modeling_gemma4_unified"

PATCH = Patch(
    id="transformers-shared-kv-unified",
    summary="the repair of transformers-shared-kv for gemma4_unified, the classes of the 12B",
    symptom="KeyError: 'sliding_attention' in Gemma4UnifiedTextAttention.forward or in its assistant model",
    severity=Severity.CRASH,
    failure_points=("F5", "F30"),
    distribution="transformers",
    affected=">=5.10.1,<5.23.0",
    measured="5.22.2",
    fixed="5.23.0",
    applied_upstream="https://github.com/huggingface/transformers/pull/47290",
    retire_when="transformers below 5.23.0 is no longer supported",
    targets=(
        Target(
            module=_UNIFIED,
            name="Gemma4UnifiedTextDecoderLayer.__call__",
            replacement=decoder_layer,
            known={
                "5dfded5b10ef": "5.10.1 - 5.14.1",
                "f5b268838e0c": "5.15.0 - 5.16.1",
                "ce746b2de925": "5.17.0 - 5.22.2",
            },
        ),
        Target(
            module=_UNIFIED,
            name="Gemma4UnifiedTextModel.forward",
            replacement=shared_kv.text_model,
            known={"6495bab9e84f": "5.10.1 - 5.22.2"},
        ),
    ),
    reproduce=reproduce,
)
