"""A model loaded from Google's QAT checkpoints can be saved.

Symptom: ``TypeError: 'bool' object is not callable`` from ``save_pretrained``.

Cause: ``GemmaQuantizer.is_serializable`` is a property, but ``save_pretrained`` calls it as a method, which it is in
every other quantizer.

Fix: The property returns a function with the same answer; as a truth value, that function is true. The packed weights
and their scales are saved unchanged. Scales for a quantized cache (``k_cache_scale``, ``v_cache_scale``), which
transformers does not load, are not saved.

Remove when: ``GemmaQuantizer.is_serializable`` is a method.
"""

from collections.abc import Callable
from typing import Any

from gemma4_compat.patches.api import Outcome, Patch, Workspace

PATCH = Patch("F56", severity="crash", affected=">=5.11", acts_on="QAT checkpoints")


@PATCH.replaces("transformers.quantizers.quantizer_gemma", "GemmaQuantizer.is_serializable")
def is_serializable(original: Callable[[Any], Any], self: Any) -> Callable[[], bool]:
    found = original(self)
    return lambda: bool(found)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    checkpoint = workspace.qat(grouped=False)  # loads on every release
    model = tiny.load(checkpoint, device=workspace.main)
    folder = workspace.new_folder()
    model.save_pretrained(folder)
    again = tiny.load(folder, device=workspace.main)
    return Outcome.of_parity(workspace.difference(workspace.outputs(model), again), "a QAT model saved")
