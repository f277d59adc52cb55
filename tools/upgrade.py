"""A release day: what a new release of a library changes for the patches, in one command.

python -m tools.upgrade LIBRARY RELEASE      such as: peft 0.22.0

Installs the newest stack with that release, fingerprints the code that patches replace in it, and runs every
reproduction there: without the patches, with them, and with them undone. Then it writes what nobody should type:
gemma4_compat/patches/measured.json, constraints/newest.txt, the stacks of tests/matrix.toml, the results in
docs/evidence and the pages made of them. It prints what a person has to look at, and exits 1 where a patch file has to
be edited.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from gemma4_compat import Patch
from gemma4_compat._engine import versions
from gemma4_compat.patches import registry
from tools import evidence, fingerprints
from tools.matrix import environments, measure, stacks
from tools.matrix.stacks import LIBRARIES, ROOT, TABLE

CONSTRAINTS = ROOT / "constraints" / "newest.txt"


@dataclass
class Look:
    """What a person has to look at.

    Attributes:
        edit: patch file -> what to write there, because what was measured is not what the patch says.
        read: target -> what happened to its code; the patches of it were measured on the new code.
    """

    edit: dict[str, str] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)


def changed(library: str, previous: str, release: str, data: fingerprints.Found) -> dict[str, str]:
    """Target -> what a release made of its code, for the targets that are not what they were."""
    before, now = data.get(f"{library} {previous}", {}), data.get(f"{library} {release}", {})
    said = {}
    for target in sorted(before.keys() | now.keys()):
        if before.get(target) != now.get(target):
            said[target] = "gone" if target not in now else "new" if target not in before else "changed"
    return said


def verdicts(library: str, release: str, patches: tuple[Patch, ...], entries: Mapping[str, Any]) -> dict[str, str]:
    """Patch file -> what a person has to write there, from the results in the new stack."""
    found = {}
    for patch in patches:
        entry = entries.get(patch.id)
        if entry is None:
            continue
        file = f"gemma4_compat/patches/{patch.area}/{patch.id.replace('-', '_')}.py"
        if patch.distribution == library and entry["claimed"] and entry["verdict"] == measure.NOT_AFFECTED:
            found[file] = (
                f'the defect is gone. affected="{patch.affected},<{release}", fixed="{release}", '
                "and the upstream change as applied_upstream"
            )
        elif entry["verdict"] not in measure.AS_CLAIMED or entry["failures"]:
            reasons = "; ".join(f"{test}: {message[:200]}" for test, message in entry["failures"].items())
            found[file] = f"{entry['verdict']}: {reasons or 'see docs/evidence/patches/' + patch.id + '.json'}"
    return found


def pinned(text: str, library: str, release: str) -> str:
    """constraints/newest.txt with another release."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    text = re.sub(r"measured on \([\d-]+\)", f"measured on ({today})", text)
    return re.sub(rf"(?m)^{re.escape(library)}==.*$", f"{library}=={release}", text)


def stacks_with(text: str, library: str, release: str, newest: stacks.Stack) -> str:
    """tests/matrix.toml with a newer newest stack, and what was the newest one under a name of its own."""
    previous = newest.pins[library]
    start = text.index('[stacks."newest"]')
    end = text.find("\n[stacks.", start) % (len(text) + 1)
    block = text[start:end].replace(f'{library} = "{previous}"', f'{library} = "{release}"')
    text = text[:start] + block + text[end:]
    name = f"{library}-{previous}"
    if f'[stacks."{name}"]' not in text:
        pins = "\n".join(f'{key} = "{value}"' for key, value in newest.pins.items())
        why = f"the last release before {library} {release}, beside the newest stack of its day"
        text = f'{text.rstrip()}\n\n[stacks."{name}"]\nwhy = "{why}"\n{pins}\nci = "gates"\ntests = "reproductions"\n'
    return text


def keep_results(name: str, newest: stacks.Stack) -> None:
    """The results of what was the newest stack, under its new name."""
    known = stacks.read()
    found = evidence.matrix({"newest": newest, name: known[name]})
    if "newest" in found and name not in found:
        evidence.write_matrix({name: found["newest"]}, known)


def fingerprinted(library: str, release: str, pins: Mapping[str, str], work: Path) -> fingerprints.Found:
    """What that release holds, beside the others of the newest stack."""
    python = environments.build(work / "upgrade", [f"{name}=={pin}" for name, pin in pins.items()])
    environment = environments.child_environment()
    done = subprocess.run(
        [str(python), "tools/fingerprints.py"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"upgrade: the fingerprints of {library} {release} cannot be taken:\n{done.stderr}")
    found: fingerprints.Found = json.loads(done.stdout)
    return {f"{library} {release}": found[f"{library} {release}"]}


def report(look: Look, library: str, release: str, patches: tuple[Patch, ...], written: list[Path]) -> str:
    """What is printed at the end."""
    lines = [f"\n{library} {release}:", "written: " + ", ".join(str(file.relative_to(ROOT)) for file in written), ""]
    lines += [f"read the change of {target} ({what})" for target, what in look.read.items()]
    lines += [f"edit {file}: {what}" for file, what in look.edit.items()]
    if not look.read and not look.edit:
        lines += ["no code that a patch replaces has changed, and every patch does what it says"]
    lines += ["", f"{len(patches)} patches measured; {len(look.edit)} files for a person to edit"]
    return "\n".join(lines)


def upgrade(library: str, release: str, work: Path, jobs: int) -> Look:
    """Measure a release and write what is known of it."""
    newest = stacks.read()["newest"]
    previous = newest.pins[library]
    if Version(release) <= Version(previous):
        raise SystemExit(f"upgrade: the newest stack has {library} {previous}; {release} is not newer")
    patches = fingerprints.patches()
    found = fingerprinted(library, release, {**newest.pins, library: release}, work)
    data = fingerprints.merged(fingerprints.known(), [found])
    concerned = {
        str(target) for patch in patches if versions.admits(patch.affected, release) for target in patch.targets
    }
    news = changed(library, previous, release, data)
    look = Look(read={target: what for target, what in news.items() if target in concerned})
    fingerprints.DATA.write_text(fingerprints.text(data, patches), encoding="utf-8")
    CONSTRAINTS.write_text(pinned(CONSTRAINTS.read_text(encoding="utf-8"), library, release), encoding="utf-8")
    TABLE.write_text(stacks_with(TABLE.read_text(encoding="utf-8"), library, release, newest), encoding="utf-8")
    keep_results(f"{library}-{previous}", newest)
    # In a process of its own: this one has the data of before.
    command = [sys.executable, "-m", "tools.matrix", "--work", str(work), "run", "newest", "--reproductions"]
    subprocess.run([*command, "--split", str(jobs)], cwd=ROOT, check=False)
    entries = stacks.results()["newest"]["patches"]
    look.edit = verdicts(library, release, patches, entries)
    subprocess.run([sys.executable, "tools/docs.py"], cwd=ROOT, check=True)
    written = [fingerprints.DATA, CONSTRAINTS, TABLE, evidence.EVIDENCE, ROOT / "docs" / "patches"]
    print(report(look, library, release, patches, written))
    return look


def again(libraries: Sequence[str], work: Path) -> int:
    """Fingerprint every measured release of these libraries, beside the newest stack, and write the data."""
    newest, found = dict(stacks.read()["newest"].pins), []
    for library in libraries or LIBRARIES:
        for release in registry.RELEASES[library]:
            found.append(fingerprinted(library, release, {**newest, library: release}, work))
            print(f"{library} {release}", flush=True)
    print("\n".join(fingerprints.write(found)) or "nothing new")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES, nargs="?")
    parser.add_argument("release", nargs="?")
    parser.add_argument("--again", nargs="*", choices=LIBRARIES, help="measured releases, their fingerprints alone")
    parser.add_argument("--work", type=Path, default=ROOT / ".nox" / "cells", help="where environments are built")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run reproductions (default: 2)")
    options = parser.parse_args(argv)
    if options.again is not None:
        return again(options.again, options.work)
    if options.release is None:
        parser.error("a library and a release are needed, such as: peft 0.22.0")
    try:
        Version(options.release)
    except InvalidVersion:
        parser.error(f"{options.release!r} is not a release, such as {registry.RELEASES[options.library][-1]}")
    return 1 if upgrade(options.library, options.release, options.work, options.jobs).edit else 0


if __name__ == "__main__":
    sys.exit(main())
