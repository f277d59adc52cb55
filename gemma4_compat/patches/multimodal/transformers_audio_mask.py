"""The audio tower attends to the right positions whatever attention implementation is requested.

Symptom: silent: with ``attn_implementation="eager"`` the audio tower attends to exactly what is masked: the padding
and the positions outside its window, and nothing else. Its features are off by a third to a half of their size. With
``"flex_attention"`` the first audio input raises ``AttributeError: 'BlockMask' object has no attribute 'device'``.

Cause: ``Gemma4AudioAttention`` expects a boolean mask. ``create_bidirectional_mask`` returns one for ``sdpa``. For
``eager`` it returns an additive mask, where 0 marks the positions to attend to, which reads as False. What it
returns for the other implementations has no boolean form at all. The attention computation itself is the same for
every implementation.

Fix: ``Gemma4AudioModel._convert_4d_mask_to_blocked_5d`` turns an additive mask into a boolean one before it cuts the
mask into blocks. When any implementation but ``eager`` or ``sdpa`` is requested, the audio tower runs ``eager``, and
one INFO line of the logger ``gemma4_compat`` says so. An implementation that is unknown or not installed still
raises upstream's error.

Remove when: transformers below 5.20.0 is no longer supported.
"""

import functools
import logging
from typing import Any

from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F8",
    severity="wrong_result",
    affected=">=5.5.0,<5.20.0",
    bug="issues/48818",
    applied_upstream="releases/tag/v5.20.0",
)

_LOGGER = logging.getLogger("gemma4_compat")
_KNOWN = frozenset({"eager", "sdpa", "paged|eager", "paged|sdpa"})


@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioModel._convert_4d_mask_to_blocked_5d")
def blocked(original: Original, self: Any, mask_4d: Any) -> Any:
    return original(self, mask_4d == 0 if mask_4d.is_floating_point() else mask_4d)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioModel.get_correct_attn_implementation")
@PATCH.replaces(MODELING_GEMMA4, "Gemma4AudioModel._check_and_adjust_attn_implementation")
def implementation(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    found = original(self, *args, **kwargs)  # raises if it is unknown or not installed
    if found in _KNOWN:
        return found
    _say(found)
    return "eager"


@functools.cache
def _say(asked: str) -> None:
    _LOGGER.info(
        "gemma4_compat: the audio tower cannot run attn_implementation=%r and runs its eager attention", asked
    )


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.scenarios import features, relative

    workspace.needs("audio_tower")
    batch = tiny.inputs(workspace.main)
    generator = torch.Generator().manual_seed(13)
    sound = {
        "input_features": torch.randn(2, 200, 128, generator=generator).to(batch["input_ids"].device),
        "input_features_mask": (torch.arange(200) < torch.tensor([[200], [90]])).to(batch["input_ids"].device),
    }
    usual = workspace.load()
    model = tiny.load(workspace.checkpoint, device=workspace.main, attn_implementation={"audio_config": "eager"})
    expected, found = (features(each, sound, "audio") for each in (usual, model))
    if not torch.equal(found, expected):
        return Outcome(True, f"sound features are off by {relative(found, expected):.2g} of their size")
    return Outcome.of_parity(workspace.difference(workspace.reference(), model), "eager audio attention")
