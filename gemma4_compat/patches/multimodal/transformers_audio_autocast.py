"""The audio tower runs under float16 autocast.

Symptom: ``RuntimeError: value cannot be converted to type c10::Half without overflow`` in the audio tower under
``torch.autocast`` to float16, which is what ``Trainer(fp16=True)`` uses.

Cause: In a float32 model, autocast makes the linear layers and the attention return float16. The tower clamps that
to ``gradient_clipping``, 1e10, and fills masked logits with ``attention_invalid_logits_value``, -1e9. It limits the
first to the range of its weights' or its input's dtype, here float32, and does not limit the second at all
(``Gemma4AudioLayer``, ``Gemma4AudioFeedForward``, ``Gemma4AudioLightConv1d`` and ``Gemma4AudioAttention``).

Fix: Under float16 autocast both are limited to the range of float16, as in a float16 model. The softmax is computed
in float32, where the lowest float16 value still masks completely. Outside of float16 autocast no bit changes.

Remove when: the audio tower limits its numbers to the range of the dtype of the tensor they apply to.
"""

from typing import Any

from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._gemma4.models import autocast
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F25", severity="crash", affected=">=5.5.0", after="transformers-quantized-audio")

#: Bound for the relative difference from float32: 0.003 on transformers 5.23, 0.01 on 5.5.0; 0.3 for a tower without
#: its mask.
BOUND = 0.05
_LARGEST = 65504.0  # float16


@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioLayer.forward")
@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioFeedForward.forward")
@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioLightConv1d.forward")
def clipped(original: Original, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    if _makes_half(hidden_states):
        self = PlainView(self, gradient_clipping=min(self.gradient_clipping, _LARGEST))
    return original(self, hidden_states, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioAttention.forward")
def attention(original: Original, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    if _makes_half(hidden_states):
        lowest = max(float(self.config.attention_invalid_logits_value), -_LARGEST)
        self = PlainView(self, config=PlainView(self.config, attention_invalid_logits_value=lowest))
    return original(self, hidden_states, *args, **kwargs)


def _makes_half(tensor: Any) -> bool:
    import torch

    return autocast.dtype_on(tensor.device) is torch.float16


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.scenarios import features, relative

    workspace.needs("audio_tower")
    batch = tiny.inputs(workspace.main)
    # Longer than the tower's window, with padding in the second half, so that the mask matters.
    generator = torch.Generator().manual_seed(11)
    batch["input_features"] = torch.randn(1, 200, 128, generator=generator).to(batch["input_ids"].device)
    batch["input_features_mask"] = (torch.arange(200) < 120)[None].to(batch["input_ids"].device)
    model = tiny.load(workspace.checkpoint, device=workspace.main).float()
    reference = features(model, batch, "audio")
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.float16):
        found = relative(features(model, batch, "audio"), reference)
    return Outcome(not found < BOUND, f"sound features under float16 autocast are those of float32, to {found:.2g}")
