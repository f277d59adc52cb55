"""A pipeline accepts a model whose device map begins with an offloaded module.

Symptom: ``RuntimeError: Expected one of cpu, cuda, ... device type at start of device string: disk`` from
``pipeline(...)``. With the vision tower in host memory the pipeline works, but keeps its tensors on the CPU and
samples there.

Cause: ``Pipeline.__init__`` uses the first entry of ``hf_device_map`` as the device of its tensors. In the map of a
multimodal model that is the vision tower's, and ``"disk"`` is not a device.

Fix: If that entry is ``"disk"``, or ``"cpu"`` for a Gemma 4 that computes elsewhere, the pipeline's tensors go to
``model.device``, which is where the model takes its inputs. Any other pipeline is built as before.

Remove when: ``Pipeline.__init__`` of transformers uses the execution device of an offloaded module.
"""

from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F37",
    severity="crash",
    affected=">=5.5",
    acts_on="every model",
    requires="accelerate",
    needs="transformers-model-device",
)


@PATCH.replaces("transformers.pipelines.base", "Pipeline.__init__")
def init(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    owner = module_hooks.map_owner(model)
    if owner is None:
        return original(self, model, *args, **kwargs)
    asked = owner.hf_device_map
    first = str(next(iter(asked.values())))
    offloaded = first == "disk" or (first == "cpu" and family.has_parts(model))
    if not offloaded or model.device.type in (first, "meta"):
        return original(self, model, *args, **kwargs)
    # Only its first entry is read; a `device` beside a map is refused.
    owner.hf_device_map = {"": model.device}
    try:
        return original(self, model, *args, **kwargs)
    finally:
        owner.hf_device_map = asked


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from transformers import pipeline

    from gemma4_compat._lab import tiny

    model = workspace.load()
    entries = tiny.device_map(model, "towers", main=workspace.main, offloaded="disk")
    model = workspace.dispatch_map(model, dict(sorted(entries.items(), key=lambda entry: entry[1] != "disk")))
    made = pipeline("text-generation", model=model, tokenizer=_tokenizer())
    if made.device.type != torch.device(workspace.main).type:
        return Outcome(True, f"the tensors go to {made.device}, the model computes on {workspace.main}")
    return Outcome.of_parity(workspace.difference(workspace.reference(), made.model), f"a pipeline on {made.device}")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0})), pad_token="<pad>")
