"""``raised`` of gemma4_compat/patches/measured.json: errors of reproductions in the stacks of tests/matrix.toml."""

from __future__ import annotations

import re
from collections import Counter

import gemma4_compat
from gemma4_compat import Patch
from gemma4_compat._doctor.explain import messages, search
from tools.pages import matrix

_LONGEST = 300
# Of a reproduction with two models: "gemma4: KeyError: 3; gemma4_unified: KeyError: 3".
_PART = re.compile(r"(?:^|; )gemma4(?:_unified)?: ")
_ERROR = re.compile(r"[A-Z]\w*(?:Error|Exception): ?")


def errors() -> dict[str, tuple[str, ...]]:
    """Patch -> the different errors, numbers aside, in the order of the stacks.

    Where the crash of another patch came first, it says nothing of this one.
    """
    stacks = matrix.results().values()
    found: dict[str, tuple[str, ...]] = {}
    for patch in gemma4_compat.patches():
        texts: dict[str, str] = {}
        count: Counter[str] = Counter()
        for stack in stacks:
            for run in ("off", "reverted"):
                result = stack["patches"].get(patch.id, {}).get(run)  # a patch that is not measured yet raised nothing
                if result and result["defect"]:
                    for part in filter(_ERROR.match, _PART.split(result["detail"])):
                        count[name := re.sub(r"\d+", "0", part)] += 1
                        texts.setdefault(name, part.strip()[:_LONGEST])
        usual = [] if patch.symptom.startswith("silent") else [name for name, _ in count.most_common(1)]
        kept = [text for name, text in texts.items() if name in usual or not _is_anothers(text, patch)]
        if kept:
            found[patch.id] = tuple(kept)
    return found


def _is_anothers(text: str, patch: Patch) -> bool:
    """Whether the symptoms of other patches quote an error, and that of this one does not."""
    matches = search.search(messages.read(text), gemma4_compat.patches(), raised={}, by_name=False).matches
    return bool(matches) and patch.id not in {match.patch.id for match in matches}
