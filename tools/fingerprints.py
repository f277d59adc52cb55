"""The measured data of the patches: gemma4_compat/patches/measured.json, which this writes and nobody edits.

`gemma4_compat/patches/registry.py` reads it and says what it holds; a line each.

python tools/fingerprints.py                 the fingerprints of all targets in this environment's libraries, as JSON
python tools/fingerprints.py --write [FILE]  into the data: this environment's, or those in such files
python tools/fingerprints.py --check         exit 1 when the data is not what this environment's libraries say

After a patch was added or removed, `--write` brings the data up to date with the patch files. What the data lacks then
are the other releases of that library: `nox -s fingerprints -- LIBRARY` measures all of them, a few seconds each.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":  # the libraries as they are; of a replaced function, what it replaces is looked at
    os.environ["GEMMA4_COMPAT_DISABLE"] = "all"

from packaging.version import Version  # noqa: E402

from gemma4_compat._engine import changes, versions  # noqa: E402
from gemma4_compat._engine.fingerprint import fingerprint, fingerprint_source  # noqa: E402
from gemma4_compat._engine.patch import Patch, Target  # noqa: E402
from gemma4_compat.patches import registry  # noqa: E402

DATA = ROOT / "gemma4_compat" / "patches" / "measured.json"

Found = dict[str, dict[str, str]]  # release of a distribution ("peft 0.21.2") -> target -> fingerprint


def patches() -> tuple[Patch, ...]:
    """The patch of every file in the folders of gemma4_compat/patches, whatever the data lists."""
    files = sorted(path.relative_to(DATA.parent).with_suffix("").parts for path in DATA.parent.glob("*/[!_]*.py"))
    return tuple(registry.complete(".".join(parts)) for parts in files)


def here() -> Found:
    """What the libraries of this environment hold."""
    found: Found = {}
    for patch in patches():
        installed = versions.installed(patch.distribution)
        if installed is None:
            raise SystemExit(f"{patch.distribution} is not installed: it has no metadata on sys.path")
        release = f"{patch.distribution} {installed}"
        for target in patch.targets:
            if target.codes:  # of torch, in the patch file
                continue
            try:
                code = of(target)
            except (ImportError, AttributeError, KeyError) as error:
                print(f"{release}: {target}: {error}", file=sys.stderr)
                continue
            found.setdefault(release, {})[str(target)] = code
    return found


def of(target: Target) -> str:
    try:
        importlib.import_module(target.module)
    except AttributeError:  # it is for GPUs, and this PyTorch is not
        return _in_file(target)
    owner, name = changes.resolve_owner(target.module, target.name)
    return fingerprint(changes.raw_slot(owner, name, attribute=target.attribute))


def _in_file(target: Target) -> str:
    """The fingerprint of a function whose module cannot be imported."""
    spec = importlib.util.find_spec(target.module)
    text = Path(str(spec and spec.origin)).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == target.name and not node.decorator_list:
            return fingerprint_source(ast.get_source_segment(text, node) or "")
    raise AttributeError(f"{target.module} has no function {target.name}")


def known() -> Found:
    """What the data holds, in the form of :func:`here`."""
    found: Found = {}
    for target, codes in registry.KNOWN.items():
        name = target.partition(".")[0]
        for code, spans in codes.items():
            for release in versions.in_spans(spans, registry.RELEASES[name]):
                found.setdefault(f"{name} {release}", {})[target] = code
    return found


def differences(found: Found, data: Found) -> list[str]:
    """What the data says otherwise than ``found``, for the releases in ``found``; a line each."""
    lines = []
    for release, codes in found.items():
        if release.split()[1] not in registry.RELEASES.get(release.split()[0], ()):
            lines.append(f"{release} is not among the measured releases")
            continue
        held = data.get(release, {})
        for target in sorted(codes.keys() | held.keys()):
            if codes.get(target) != held.get(target):
                lines.append(f"{release}: {target} is {codes.get(target)}, in the data {held.get(target)}")
    return lines


def merged(data: Found, found: Iterable[Found]) -> Found:
    """``data`` with what was ``found``; a release that was measured again replaces what was known of it."""
    result = dict(data)
    for item in found:
        result |= item
    return result


def text(data: Found, known_patches: Iterable[Patch], raised: Mapping[str, Iterable[str]] = registry.RAISED) -> str:
    """The data file. What is ``raised`` no fingerprint says: tools/docs.py takes it from docs/evidence."""
    known_patches = tuple(known_patches)
    names = sorted({patch.distribution for patch in known_patches})
    targets = {str(target) for patch in known_patches for target in patch.targets}
    releases: dict[str, list[str]] = {name: list(registry.RELEASES.get(name, ())) for name in names}
    for release in data:
        name, number = release.split()
        if name in releases and number not in releases[name]:
            releases[name].append(number)
    ordered = {name: sorted(numbers, key=Version) for name, numbers in releases.items()}
    codes: dict[str, dict[str, list[str]]] = {}
    for release, held in data.items():
        name, number = release.split()
        for target, code in held.items():
            if target in targets:
                codes.setdefault(target, {}).setdefault(code, []).append(number)
    modules = {
        f"{patch.area}.{patch.id.replace('-', '_')}": list(dict.fromkeys(target.module for target in patch.targets))
        for patch in known_patches
    }
    held_by: dict[str, dict[str, str]] = {}
    for target in sorted(codes):
        order = ordered[target.partition(".")[0]]
        spans = {code: versions.span_text(numbers, order) for code, numbers in codes[target].items()}
        first = sorted(spans, key=lambda code: order.index(spans[code].split(", ")[0].split(" - ")[0]))
        held_by[target] = {code: spans[code] for code in first}
    ids = {patch.id for patch in known_patches}
    errors = {name: list(texts) for name, texts in sorted(raised.items()) if name in ids}
    return _json({"releases": ordered, "modules": dict(sorted(modules.items())), "known": held_by, "raised": errors})


def _json(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with a line for each entry of a part, so that a diff shows what changed."""
    texts = []
    for name, entries in parts.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        texts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(texts) + "\n}\n"


def write(found: Iterable[Found]) -> list[str]:
    """Bring the data file up to date. Returns what is new, a line each."""
    before, data = known(), merged(known(), found)
    DATA.write_text(text(data, patches()), encoding="utf-8")
    return differences(data, before)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", nargs="*", type=Path, metavar="FILE")
    what.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    if options.check:
        lines = differences(here(), known())
        print("\n".join(lines) or "the data is what this environment's libraries say")
        return 1 if lines else 0
    if options.write is not None:
        files: list[Mapping[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in options.write]
        print("\n".join(write([dict(file) for file in files] or [here()])) or "nothing new")
        return 0
    json.dump(here(), sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
