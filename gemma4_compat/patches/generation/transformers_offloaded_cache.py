"""Offloaded caches return the keys and values that a layer stored.

Symptom: silent: with ``cache_implementation="offloaded"`` or ``"offloaded_static"`` a layer may attend to keys and
values that were fetched before they were stored.

Cause: A layer's keys and values are copied to pinned host memory on the compute stream. ``Cache.prefetch`` fetches
them again on another stream without waiting. With few offloaded layers (the E2B has seven full-attention layers, three
of them with their own keys) the next token fetches them soon after. Observed on a GPU with 5.6.2; judging by their
source, the other releases up to 5.19.0 copy in the same way.

Fix: The prefetch stream waits for the compute stream, as from transformers 5.20.0 on.

Remove when: transformers below 5.20.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4 import host
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F24",
    severity="wrong_result",
    affected=">=5.5.0,<5.20.0",
    acts_on="every model",
    applied_upstream="releases/tag/v5.20.0",
)
detect = host.has_cuda

#: Cycles by which the reproduction delays a copy to the host; 25 to 50 ms on current GPUs.
DELAY = 50_000_000


@PATCH.replaces("transformers.cache_utils", "Cache.prefetch")
def prefetch(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    import torch

    for device in {layer.device for layer in self.layers if layer.is_initialized}:
        self.prefetch_stream.wait_stream(torch.cuda.default_stream(device))
    original(self, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from unittest import mock

    import torch
    from transformers.cache_utils import CacheLayerMixin

    from gemma4_compat._lab import tiny

    if not torch.cuda.is_available():
        return Outcome(False, "no CUDA device: there are no offloaded caches", applicable=False)
    offload = CacheLayerMixin.offload

    def late(layer: Any) -> None:
        torch.cuda._sleep(DELAY)
        offload(layer)

    model = workspace.load().float()
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": 6, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(**options)
    with mock.patch.object(CacheLayerMixin, "offload", late):
        found = model.generate(**options, cache_implementation="offloaded")
    worst = max((one - other).abs().max().item() for one, other in zip(expected.logits, found.logits))
    scale = max(one.abs().max().item() for one in expected.logits)
    return Outcome(
        not worst < 1e-4 * scale, f"with an offloaded cache, whose copies take long, logits are off by {worst:.2g}"
    )
