"""Static caches work with a chunked prefill (``prefill_chunk_size``).

Symptom: ``RuntimeError: index_copy_(): Source/destination tensor must have same slice shapes`` (5.13 and 5.14), or
``AmbiguousGlobalPerLayerAttributeError: 'head_dim' is a per-layer attribute`` (5.15 to 5.17), when a static cache is
used together with ``prefill_chunk_size``.

Cause: For a chunked prefill, ``generate`` allocates the static cache in advance.
``GenerationMixin._get_static_cache_init_shape`` returns one head width for all layers, but Gemma 4's full attention
layers have wider heads than its sliding layers.

Fix: For Gemma 4, that function returns no shape. The layers are allocated when they get their first keys, as they are
without chunks and in every other release. Other models keep upstream's behaviour.

Remove when: transformers 5.13 to 5.17 are no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F24", severity="crash", affected=">=5.13.0,<5.18.0", bug="issues/48501", applied_upstream="pull/48619")


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._get_static_cache_init_shape")
def init_shape(original: Original, self: Any) -> Any:
    return None if is_gemma4_config(self.config) else original(self)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    model = workspace.load().float()
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**options)
    options["disable_compile"] = True  # on a GPU upstream compiles with a static cache, which is not tested here
    found = model.generate(**options, cache_implementation="static", prefill_chunk_size=5)
    same = expected.equal(found)
    return Outcome(not same, f"a static cache filled in chunks gives {'the same' if same else 'other'} tokens")
