"""Print the fingerprints of every patch's targets in the libraries of this environment, as JSON.

python tools/fingerprints.py            {"<target>": {"<fingerprint>": "<release>"}, ...} for what is installed here
python tools/fingerprints.py A.json ... the union of such files, as the ``known`` mappings the patch files hold

Run the first form once in each release a patch claims (`nox -s matrix` has the cells); paste what the second prints.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path


def here() -> dict[str, dict[str, str]]:
    os.environ["GEMMA4_COMPAT_DISABLE"] = "all"
    import gemma4_compat
    from gemma4_compat._engine import changes
    from gemma4_compat._engine import versions as _versions
    from gemma4_compat._engine.fingerprint import fingerprint

    found: dict[str, dict[str, str]] = {}
    for patch in gemma4_compat.patches():
        version = _versions.installed(patch.distribution)
        for target in patch.targets:
            try:
                importlib.import_module(target.module)
                owner, name = changes.resolve_owner(target.module, target.name)
                code = fingerprint(changes.raw_slot(owner, name))
            except (ImportError, AttributeError, KeyError) as error:
                print(f"{patch.distribution} {version}: {target}: {error}", file=sys.stderr)
                continue
            found.setdefault(str(target), {})[code] = str(version)
    return found


def union(files: list[Path]) -> dict[str, dict[str, list[str]]]:
    from packaging.version import Version

    merged: dict[str, dict[str, set[str]]] = {}
    for file in files:
        for target, codes in json.loads(file.read_text(encoding="utf-8")).items():
            for code, version in codes.items():
                merged.setdefault(target, {}).setdefault(code, set()).add(version)
    return {
        target: {code: sorted(versions, key=Version) for code, versions in codes.items()}
        for target, codes in sorted(merged.items())
    }


if __name__ == "__main__":
    arguments = [Path(name) for name in sys.argv[1:]]
    json.dump(union(arguments) if arguments else here(), sys.stdout, indent=2)
    print()
