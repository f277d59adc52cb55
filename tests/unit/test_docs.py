"""Generated documentation is current, and the README's set-up commands are the ones CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_documentation_is_current() -> None:
    done = subprocess.run([sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_has_two_set_up_commands_one_for_doctor_and_one_for_the_tests() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^pip install.*$", readme, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("&& gemma4-compat doctor")
    assert commands[1].endswith("&& python -m pytest -n 2")


def test_constraints_name_the_stacks_the_patches_were_measured_on() -> None:
    import gemma4_compat

    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints" / "newest.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    for patch in gemma4_compat.patches():
        if patch.fixed is None:
            assert pins[patch.distribution] == patch.measured, patch.id
