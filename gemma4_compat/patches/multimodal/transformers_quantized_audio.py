"""Audio input works with a quantized audio tower.

Symptom: ``TypeError: torch.finfo() requires a floating point input type`` in the audio tower when it is quantized.

Cause: ``Gemma4AudioFeedForward`` and ``Gemma4AudioLightConv1d`` call ``torch.finfo`` on the dtype of a weight, and
``Gemma4AudioAttention`` casts to the dtype of the weight of ``post``. In a quantized tower that dtype is ``uint8``
or ``int8``.

Fix: Upstream's functions run with linears that report the dtype of the hidden states, which is what later releases
use. An unquantized tower takes upstream's own path.

Remove when: transformers below 5.11.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.models import compute_dtype
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F10",
    severity="crash",
    affected=">=5.5.0,<5.11.0",
    bug="issues/45672",
    applied_upstream="releases/tag/v5.11.0",
    requires="bitsandbytes",
    needs="bitsandbytes-cpu-strides bitsandbytes-int8-strides",
)

#: As in ``transformers_quantized_vision.py``: 0.02 in 4-bit and in 8-bit on transformers 5.23.
BOUND = 0.15


@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioFeedForward.forward")
def feed_forward(original: Original, self: Any, hidden_states: Any) -> Any:
    return original(
        compute_dtype.for_quantized(self, hidden_states.dtype, "ffw_layer_1", "ffw_layer_2"), hidden_states
    )


@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioLightConv1d.forward")
def convolution(original: Original, self: Any, hidden_states: Any) -> Any:
    return original(
        compute_dtype.for_quantized(self, hidden_states.dtype, "linear_start", "linear_end"), hidden_states
    )


@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioAttention.forward")
def attention(original: Original, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    return original(compute_dtype.for_quantized(self, hidden_states.dtype, "post"), hidden_states, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab.scenarios import compare_quantized_tower, features

    workspace.needs("audio_tower")
    # The features are measured in the quantization whose kernels accept any input. The other one, whose defect
    # bitsandbytes-cpu-strides or bitsandbytes-int8-strides fixes, only has to run.
    measured, other = ("8bit", "4bit") if workspace.main == "cpu" else ("4bit", "8bit")
    error, contrast = compare_quantized_tower(workspace, measured, "audio")
    if not error < BOUND or contrast < BOUND:
        return Outcome(True, f"sound features are off by {error:.2g} of their size")
    features(workspace.load(other, towers=True), workspace.inputs(), "audio")
    return Outcome(False, f"sound features in {measured} are those of the dequantized weights, to {error:.2g}")
