"""Training with padding on an H100 has no NaN gradients.

Symptom: silent: the loss is finite, and gradients are NaN from the first step, in training with padded batches in
bfloat16 or float16 on an H100.

Cause: On such a GPU PyTorch computes masked ``scaled_dot_product_attention`` with cuDNN, for heads of up to 256. Its
backward pass may give NaN for a query that sees no key: a padded one on the left, or one on the right after more
padding than the sliding window. Other kernels give zero. Seen on an H100 with torch 2.11 and CUDA 13 for 64 and 192
tokens, not for 17, 100, 128 or 256; upstream's report also names lengths that are 64 more than a multiple of 128, with
torch 2.11 and newer.

Fix: While gradients are recorded, and if PyTorch may use cuDNN (compute capability 9.0 or newer,
``torch.backends.cuda.cudnn_sdp_enabled()``), such a query of a Gemma 4 sees every key and its output is set to zero.
That is what other kernels compute for it, and nothing changes for any other query. This happens where a layer calls
``sdpa``, so the user's own masks are covered, and the results at padded positions stay the same. A mask of at least
64 MiB is looked at once, and not copied if every query in it sees a key. While gradients are recorded, layers of other
models call the same function, which calls upstream's at once.

Remove when: no supported release of torch has this defect.
"""

from typing import Any

from gemma4_compat._gemma4.attention import unseen_keys
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F70",
    severity="wrong_result",
    affected=">=5.5.0",
    acts_on="every model",
    bug="https://github.com/pytorch/pytorch/issues/196678",
)


@PATCH.replaces(
    "transformers.modeling_utils", "AttentionInterface.__getitem__", affected="<5.7.0", dormant=unseen_keys.no_cuda
)
@PATCH.replaces(
    "transformers.modeling_utils", "AttentionInterface.get_interface", affected=">=5.7.0", dormant=unseen_keys.no_cuda
)
def attention_function(original: Original, self: Any, key: str, *default: Any) -> Any:
    import torch

    found = original(self, key, *default)
    if key != "sdpa" or not torch.is_grad_enabled():
        return found
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # One function for all calls; what another library has registered as sdpa stays.
    return unseen_keys.attention if found is sdpa_attention_forward else found


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab.stand_ins import cudnn

    with cudnn.kernel(workspace.main) as name:
        broken, weights = cudnn.broken(workspace.load(), cudnn.padded(workspace.main))
    return Outcome(bool(broken), f"gradients of {broken} of {weights} weights are NaN ({name})")
