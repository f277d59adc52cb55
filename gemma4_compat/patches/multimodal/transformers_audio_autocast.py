"""``RuntimeError: value cannot be converted to type c10::Half without overflow`` in the audio tower under
``torch.autocast`` to float16, which is ``Trainer(fp16=True)``.

Why: autocast makes float16 of what the linear layers and the attention return, in a model of float32. The tower clamps
that to ``gradient_clipping``, 1e10, and fills masked logits with ``attention_invalid_logits_value``, -1e9. It asks the
dtype of its weights, or of what it was given, how much of the one is possible, and nothing about the other.

Here: under float16 autocast both are the last numbers that float16 has, as in a float16 model. Under the softmax,
which is taken in float32, the lowest of them is the same nothing.

Goes when the audio tower limits its numbers to those of the tensor it limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import autocast

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

#: Of the relative difference from float32: 0.003 on transformers 5.23, 0.01 on 5.5.0;
#: a tower without its mask is at 0.3.
BOUND = 0.05
_LARGEST = 65504.0  # float16


def clipped(original: Callable[..., Any], self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    if _makes_half(hidden_states):
        self = _Instead(self, gradient_clipping=min(self.gradient_clipping, _LARGEST))
    return original(self, hidden_states, *args, **kwargs)


def attention(original: Callable[..., Any], self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    if _makes_half(hidden_states):
        lowest = max(float(self.config.attention_invalid_logits_value), -_LARGEST)
        self = _Instead(self, config=_Instead(self.config, attention_invalid_logits_value=lowest))
    return original(self, hidden_states, *args, **kwargs)


def _makes_half(tensor: Any) -> bool:
    import torch

    return autocast.dtype_on(tensor.device) is torch.float16


class _Instead:
    """An object, but for the attributes given."""

    def __init__(self, of: Any, **attributes: Any) -> None:
        self._of = of
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.scenarios import features, relative

    workspace.needs("audio_tower")
    batch = tiny.inputs(workspace.main)
    # Longer than the tower's window, and the second half of it padding: the mask has something to do.
    generator = torch.Generator().manual_seed(11)
    batch["input_features"] = torch.randn(1, 200, 128, generator=generator).to(batch["input_ids"].device)
    batch["input_features_mask"] = (torch.arange(200) < 120)[None].to(batch["input_ids"].device)
    model = tiny.load(workspace.checkpoint, device=workspace.main).float()
    reference = features(model, batch, "audio")
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.float16):
        found = relative(features(model, batch, "audio"), reference)
    return Outcome(not found < BOUND, f"sound features under float16 autocast are those of float32, to {found:.2g}")


_GEMMA4 = "transformers.models.gemma4.modeling_gemma4"

PATCH = Patch(
    id="transformers-audio-autocast",
    summary="the audio tower runs under float16 autocast",
    symptom="RuntimeError: value cannot be converted to type c10::Half without overflow",
    severity=Severity.CRASH,
    failure_points=("F25",),
    distribution="transformers",
    affected=">=5.5.0",
    measured="5.23.0",
    retire_when="the audio tower limits its numbers to those that the tensor's dtype has",
    after=("transformers-quantized-audio",),
    targets=(
        Target(
            module=_GEMMA4,
            name="Gemma4AudioLayer.forward",
            replacement=clipped,
            known={
                "b3de5a307167": "5.5.0 - 5.23.0",
            },
        ),
        Target(
            module=_GEMMA4,
            name="Gemma4AudioFeedForward.forward",
            replacement=clipped,
            known={
                "caaf18a24d08": "5.5.0 - 5.10.4",
                "e0b737e2f79d": "5.11.0 - 5.23.0",
            },
        ),
        Target(
            module=_GEMMA4,
            name="Gemma4AudioLightConv1d.forward",
            replacement=clipped,
            known={
                "17254b87bf65": "5.5.0 - 5.10.4",
                "5a94a92b18c9": "5.11.0 - 5.23.0",
            },
        ),
        Target(
            module=_GEMMA4,
            name="Gemma4AudioAttention.forward",
            replacement=attention,
            known={
                "e10f4f093247": "5.5.0 - 5.10.4",
                "f3dfb03d986b": "5.11.0 - 5.19.0",
                "1561041fb766": "5.20.0 - 5.23.0",
            },
        ),
    ),
    reproduce=reproduce,
)
