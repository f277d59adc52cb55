"""Adapters on a QAT checkpoint get gradients, and the Trainer accepts such a model.

Symptom: silent: an adapter on a model of Google's QAT checkpoints does not learn. The gradients of all its weights are
zero, except for those on the head. The Trainer refuses the model: ``the quantization method gemma does not support
training``.

Cause: Calibrated layers round their inputs and outputs to 256 steps (``apply_srq``). The derivative of ``torch.round``
is zero everywhere, so no gradient passes the first such layer on the way back: the head.

Fix: The rounding has the derivative that quantization-aware training gives it, the straight-through estimator
(Bengio, Leonard and Courville 2013, arXiv:1308.3432; ``torch.fake_quantize_per_tensor_affine`` has the same): 1
inside the range of the 256 steps, 0 where values are clipped. The forward computes the same bits as before, and so
do models that are not trained. ``is_trainable`` says that adapters can be trained.

Remove when: ``apply_srq`` of transformers passes gradients.
"""

import functools
from collections.abc import Callable
from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F56", severity="wrong_result", affected=">=5.11", acts_on="QAT checkpoints", requires="peft")


@PATCH.replaces("transformers.integrations.gemma_quant", "apply_srq")
def apply_srq(original: Original, x: Any, scale: Any, bits: int = 8) -> Any:
    import torch

    if not (x.requires_grad and torch.is_grad_enabled()):
        return original(x, scale, bits)
    # If the scale is trained, its gradients stay upstream's.
    return _straight_through().apply(original(x.detach(), scale, bits), x, scale.detach(), bits)


@functools.cache
def _straight_through() -> Any:
    import torch

    class StraightThrough(torch.autograd.Function):  # type: ignore[misc]
        """``rounded`` in the forward; in the backward its gradient also goes to ``x`` where that is in range."""

        @staticmethod
        def forward(ctx: Any, rounded: Any, x: Any, scale: Any, bits: int) -> Any:
            scale = scale.to(x.dtype)
            calibrated = scale != 0
            steps = torch.round(x / torch.where(calibrated, scale, torch.ones_like(scale)))
            end = float(2 ** (bits - 1))
            ctx.save_for_backward(~calibrated | ((steps >= -end) & (steps <= end - 1)))
            return rounded.view_as(rounded)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (gradient,) = gradients
            (inside,) = ctx.saved_tensors
            return gradient, gradient * inside, None, None

    return StraightThrough


@PATCH.replaces("transformers.quantizers.quantizer_gemma", "GemmaQuantizer.is_trainable")
def is_trainable(original: Callable[[Any], bool], self: Any) -> bool:
    return True


def reproduce(workspace: Workspace) -> Outcome:
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._lab import tiny

    model = tiny.load(workspace.qat(grouped=False), device=workspace.main)  # loads on every release
    settings = LoraConfig(r=4, target_modules=r".*language_model.*(q_proj|up_proj)", init_lora_weights=False)
    adapted = get_peft_model(model, settings).eval()
    batch = workspace.inputs(text_only=True)
    adapted(**batch, labels=batch["input_ids"]).loss.backward()
    gradients = [weight.grad for weight in adapted.parameters() if weight.requires_grad]
    dead = sum(gradient is None or not bool(gradient.any()) for gradient in gradients)
    return Outcome(dead > 0, f"{dead} of {len(gradients)} weights of an adapter have zero gradients")
