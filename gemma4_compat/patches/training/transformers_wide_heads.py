"""Memory for attention in full-attention layers grows with the length of a text, not with its square.

Symptom: silent: long texts take more memory and are slower: a forward or training step without padding computes the
attention of full-attention layers with torch's math kernel, which holds all scores of a layer at once (in float32 at
batch 1 and 8,192 tokens: 2 GiB for 8 heads).

Cause: Without a mask, ``sdpa_attention_forward`` leaves the repetition of key-value heads to torch (``enable_gqa``).
Among torch's CUDA kernels only flash and math support that, and flash supports no heads wider than 256; those of
full-attention layers are 512 wide.

Fix: Key-value heads wider than 256 are repeated before the call, as upstream does from 5.13.0 on; torch then uses its
memory-efficient kernel. Outputs are equal up to that kernel's rounding.

Remove when: transformers before 5.13.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.attention.flash import WIDEST
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F59", severity="memory", affected=">=5.5.0,<5.13.0", acts_on="every model", applied_upstream="pull/46960"
)


@PATCH.replaces("transformers.integrations.sdpa_attention", "use_gqa_in_sdpa")
def use_gqa_in_sdpa(original: Original, attention_mask: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(attention_mask, key, *args, **kwargs)
    return found and (key.shape[-1] <= WIDEST or key.device.type == "xpu")  # Intel's kernels support both


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import scenarios, tiny

    model = tiny.load(workspace.larger(full_width=512), device=workspace.main)

    def heads(query: Any, *_: Any, enable_gqa: bool = False, **__: Any) -> tuple[int, bool]:
        return query.shape[-1], enable_gqa

    with torch.no_grad(), scenarios.noted(torch.nn.functional, "scaled_dot_product_attention", heads) as seen:
        model(input_ids=workspace.inputs(text_only=True)["input_ids"])
    wide = [grouped for width, grouped in seen if width > 256]
    if not wide:
        return Outcome(False, "no wide heads in sdpa", applicable=False)
    return Outcome(
        any(wide),
        f"{sum(wide)} of {len(wide)} layers with heads of 512 leave grouped heads to sdpa: its math kernel on CUDA",
    )
