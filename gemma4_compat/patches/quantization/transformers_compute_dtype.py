"""A 4-bit load whose layers compute in float32 logs a line that says so.

Symptom: silent: ``BitsAndBytesConfig(load_in_4bit=True)`` under ``dtype=torch.bfloat16`` multiplies in float32. Each
linear layer casts its input to float32 and its output back: more time and memory than the same layer in bfloat16.

Cause: ``bnb_4bit_compute_dtype`` defaults to float32, whatever the dtype of the model. bitsandbytes warns if inputs
are float16, but not if they are bfloat16.

Fix: Loading a Gemma 4 in 4 bits logs one line with the option to pass. Nothing is changed: float32 gives different
outputs, and results saved or merged with it must stay reproducible.

Remove when: transformers takes the model's dtype for 4-bit computation, or says that it does not.
"""

import logging
from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F61", kind="notice", severity="speed", affected=">=5.5", requires="bitsandbytes")

_log = logging.getLogger("gemma4_compat")


@PATCH.replaces("transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._process_model_after_weight_loading")
def process_model_after_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    loaded = original(self, model, *args, **kwargs)
    if family.has_parts(model):
        _say(model, self.quantization_config.bnb_4bit_compute_dtype)
    return loaded


def _say(model: Any, compute: Any) -> None:
    import torch

    if compute != torch.float32 or model.dtype == torch.float32:
        return
    layers = sum(type(module).__name__ == "Linear4bit" for module in model.modules())
    if layers:
        name = str(model.dtype)
        _log.warning(
            "gemma4_compat: %d layers in 4 bits compute in float32, and the model is %s: pass "
            "bnb_4bit_compute_dtype=%s to BitsAndBytesConfig to compute in that",
            layers,
            name.removeprefix("torch."),
            name,
        )


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    _log.addHandler(handler)
    try:
        AutoModelForImageTextToText.from_pretrained(
            workspace.checkpoint,
            dtype=torch.bfloat16,
            device_map={"": workspace.main},
            quantization_config=BitsAndBytesConfig(load_in_4bit=True),
        )
    finally:
        _log.removeHandler(handler)
    lines = [line for line in said if "compute in float32" in line]
    return Outcome(
        not lines, f"a bfloat16 model in 4 bits computes in float32, and {len(lines) or 'no'} line of the log says so"
    )
