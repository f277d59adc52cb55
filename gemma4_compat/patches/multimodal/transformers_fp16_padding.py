"""Padded prompts work in a float16 model with eager attention.

Symptom: silent: in float16 with ``attn_implementation="eager"`` all logits of a prompt that is padded on the left can
be NaN, even those of its own tokens.

Cause: ``eager_attention_forward`` adds -65504, the lowest float16, to the logits of masked keys. A logit of -16 or
less makes that negative infinity. A padded position on the left sees no key; if all its logits are that low, its
softmax is NaN. Later layers multiply its NaN keys and values by a weight of 0, which gives NaN for every position.
``sdpa`` adds nothing: its mask is boolean.

Fix: In float16 the query of a position that sees no key is set to zero, so its logits are zero and the lowest float16
remains. Then it sees every key alike, as in float32. No other position changes, and no other dtype.

Remove when: ``eager_attention_forward`` masks in float32, or without a sum.
"""

from pathlib import Path
from typing import Any

from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F25", severity="wrong_result", affected=">=5.5.0")

#: Bound for the logits' relative difference from float32.
BOUND = 0.03


@PATCH.replaces(MODELING_GEMMA4, "eager_attention_forward", group="gemma4")
@PATCH.replaces(MODELING_UNIFIED, "eager_attention_forward", group="gemma4_unified")
def eager(
    original: Original, module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any
) -> Any:
    import torch

    if mask is not None and query.dtype is torch.float16 and mask.dtype is torch.float16:
        unseeing = (mask <= torch.finfo(torch.float16).min).all(-1, keepdim=True)  # (batch, 1, queries, 1)
        query = query.masked_fill(unseeing, 0)
    return original(module, query, key, value, mask, *args, **kwargs)


def build_low_logits(folder: Path, *, variant: str | None = None) -> None:
    """A checkpoint whose attention logits are all far below zero, as a feature that all tokens share can make them."""
    import torch

    from gemma4_compat._lab import tiny, tiny_models

    model = tiny.load(tiny_models.build_checkpoint(folder, variant=variant), dtype=torch.float32)
    text = model.model.language_model
    with torch.no_grad():
        text.embed_tokens.weight[:, 0] = 2.0
        for layer in text.layers:
            layer.self_attn.q_proj.weight[:, 0] = -2.0
            if getattr(layer.self_attn, "k_proj", None) is not None:
                layer.self_attn.k_proj.weight[:, 0] = 2.0
    model.to(torch.float16).save_pretrained(folder)


def padded(device: Any = "cpu", padding: int = 9) -> dict[str, Any]:
    """Two prompts of 24 tokens, text only; of the second the first are padding."""
    import torch

    from gemma4_compat._lab import tiny

    ids = tiny.inputs(text_only=True)["input_ids"].repeat(2, 1)
    mask = torch.ones_like(ids)
    ids[1, :padding] = mask[1, :padding] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.scenarios import relative

    batch = padded(workspace.main)
    checkpoint = workspace.cached(build_low_logits)
    real = batch["attention_mask"].bool()
    found = []
    for dtype in (torch.float16, torch.float32):
        model = tiny.load(checkpoint, device=workspace.main, dtype=dtype, attn_implementation="eager")
        with torch.no_grad():
            found.append(model(**batch).logits[real].float())
    if not found[0].isfinite().all():
        return Outcome(True, "the logits of a padded prompt are NaN")
    error = relative(*found)
    return Outcome(not error < BOUND, f"the logits of a padded prompt in float16 are those of float32, to {error:.2g}")
