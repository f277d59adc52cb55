"""Static caches work on models without KV-shared layers (26B-A4B, 31B).

Symptom: ``IndexError: list index out of range`` in ``Cache.update`` on the 26B-A4B and the 31B, with
``cache_implementation="static"``, its offloaded variant, or the caller's own ``StaticCache``.

Cause: ``StaticCache.__init__`` creates one cache layer for each layer of the model that is not KV-shared:
``layer_types[:-num_kv_shared_layers]``. The larger models share nothing, and ``[:-0]`` is ``[:0]``: no layer at all.

Fix: If there are no KV-shared layers, the cache is built from a view of the configuration that does not mention
them, like the configuration of a model that has no such feature. This is exact for any model, so the patch is not
limited to Gemma 4.

Remove when: transformers below 5.10.1 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.cache.shared_kv import Unshared, shares_nothing
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F24", severity="crash", affected=">=5.5.0,<5.10.1", acts_on="every model", applied_upstream="pull/46235"
)


@PATCH.replaces("transformers.cache_utils", "StaticCache.__init__")
def static_cache(original: Original, self: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    return original(self, Unshared(config) if shares_nothing(config) else config, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    model = workspace.load_31b().float()
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": 6, "do_sample": False}
    expected, found = model.generate(**options), model.generate(**options, cache_implementation="static")
    same = expected.equal(found)
    return Outcome(not same, f"with a static cache {'the same' if same else 'other'} tokens than with the default one")
