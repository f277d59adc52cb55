"""``KeyError: 13`` (or ``22``, ``'sliding_attention'``) in ``Gemma4TextAttention.forward``, where a KV-shared layer
reads the keys and values of an earlier one.

Why: the text model makes a dict (5.9.0: a ``UserDict``), each layer gets it as an argument, one layer writes and later
ones read. accelerate's hooks rebuild every mapping among the arguments unless a skip key names it, so a
``dispatch_model`` without ``skip_keys``, or with a list that lacks this key, loses what was written; 5.5.2 lacks it in
its own list and passes the dict by position, where no skip key reaches. FSDP and FSDP2 with ``cast_forward_inputs``
rebuild every plain dict (F33, up to 5.8.1).

Here: where something stands between the text model and a layer's attention, the layer gets the same container in a
type that all of them pass on as it is (``shared_kv.py``). The text model keeps its own and returns it as before.

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

    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.workspace import difference

    reference = workspace.outputs(workspace.load())
    model = workspace.load()
    placement = tiny.device_map(model, "both", main=workspace.main, offloaded=workspace.offloaded)
    model = dispatch_model(model, placement, offload_dir=tempfile.mkdtemp(dir=workspace.folder))
    found = difference(reference, workspace.outputs(model))
    return Outcome.of_parity(found, "dispatch_model without skip_keys")


_GEMMA4 = "transformers.models.gemma4.modeling_gemma4"

PATCH = Patch(
    id="transformers-shared-kv",
    summary="KV-shared layers find the keys and values of earlier layers on split models and under FSDP",
    symptom="KeyError: 13, 22 or 'sliding_attention' in Gemma4TextAttention.forward",
    severity=Severity.CRASH,
    failure_points=("F5", "F33"),
    distribution="transformers",
    affected=">=5.5.2,<5.23.0",
    measured="5.22.2",
    fixed="5.23.0",
    bug=("https://github.com/huggingface/transformers/issues/45663",),
    applied_upstream="https://github.com/huggingface/transformers/pull/47290",
    retire_when="transformers below 5.23.0 is no longer supported",
    targets=(
        Target(
            module=_GEMMA4,
            name="Gemma4TextDecoderLayer.__call__",
            replacement=decoder_layer,
            known={
                "5dfded5b10ef": "5.5.2 - 5.14.1",
                "f5b268838e0c": "5.15.0 - 5.16.1",
                "ce746b2de925": "5.17.0 - 5.22.2",
            },
        ),
        Target(
            module=_GEMMA4,
            name="Gemma4TextModel.forward",
            replacement=shared_kv.text_model,
            known={
                "f09af9d2d3e1": "5.5.2",
                "afbc17e8c573": "5.5.3 - 5.7.0",
                "f5ff03444111": "5.8.0 - 5.8.1",
                "187f9f28f8e5": "5.9.0 - 5.22.2",
            },
        ),
    ),
    reproduce=reproduce,
)
