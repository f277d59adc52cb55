"""The data of the box on the site's page "Find the error" (docs/errors.js)."""

from __future__ import annotations

from typing import Any

import gemma4_compat
from gemma4_compat._doctor.explain import common_errors, search
from gemma4_compat.patches.registry import RAISED
from tools.pages import errors


def known() -> dict[str, Any]:
    """What docs/errors.js compares an error with: that of ``gemma4-compat explain``."""
    patches = gemma4_compat.patches()
    patterns = [pattern for patch in patches for pattern in search.patterns_of(patch, RAISED.get(patch.id, ()))]
    return {
        "patches": {
            patch.id: {
                "entry": errors.entry(patch).replace(".md", ".html"),
                "symptom": patch.first_symptom.removeprefix("silent: "),
                "summary": patch.summary,
                "releases": errors.releases(patch),
                "targets": search.files_of(patch),
                "named": sorted(search.named_in(patch)),
                "places": search.PLACES.get(patch.id, ()),
            }
            for patch in patches
        },
        "patterns": [
            {
                "patch": pattern.patch.id,
                "text": pattern.text,
                "kind": pattern.kind,
                "words": pattern.words,
                "quoted": pattern.quoted,
                "names": sorted(pattern.names),
                "shape": None if pattern.shape is None else pattern.shape.pattern,
            }
            for pattern in patterns
        ],
        "weights": search.weights_of(patterns),
        "common": sorted(name for name in search.COMMON if name.endswith(("Error", "Exception", "Warning"))),
        "met_first": search.MET_FIRST,
        **common_errors.table(),
        "patched": sorted(common_errors.PATCHED),
        "called": sorted(common_errors.CALLED),
    }
