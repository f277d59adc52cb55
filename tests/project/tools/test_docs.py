"""Generated documentation is current, and the README's set-up commands are the ones CI runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools.pages import gpu

ROOT = Path(__file__).resolve().parents[3]


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


def test_a_gpu_scenario_is_told_in_a_line() -> None:
    split = {"error": None, "base_gib": 6.0, "adapter_gib": 6.1, "towers_on": ["meta"], "parity": 0.0}
    rows = {
        None: "not run",
        "crash": "KeyError: 3",
        "host": "all of it is put on the CPU",
        "split": "6.00 -> 6.10 GiB, towers stay, bit-exact",
        "moved": "6.00 -> 6.10 GiB, towers back on the GPU, logits differ by 0.25",
        "train": "losses differ by 0.1, gradients differ by 0.2",
        "ranks": "KeyError: 3",
    }
    crash = {"error": "KeyError: 3"}
    ways = {"whole": {"losses": [0.1, 9.0], "gradients": [0.2, 9.0]}, "halves": {"losses": [0.3], "gradients": [0.4]}}
    train = {"error": None, "from": ways}
    seen = {
        None: None,
        "crash": crash,
        "host": {"error": None, "all_on_the_host": True},
        "split": split,
        "moved": split | {"towers_on": ["cuda"], "parity": 0.25},
        "train": [train, train],
        "ranks": [train, crash],
    }
    assert {name: gpu.case_text(found) for name, found in seen.items()} == rows
    run = {"measured": {"e2b catch_all": {"without": crash, "with": split}, "e2b all_gpu": {"error": None}}}
    assert gpu.rows_of(run, "e2b ") == {"e2b catch_all": f"| catch_all | KeyError: 3 | {rows['split']} |"}
    said = [gpu.verdict({"without": {"defect": one}, "with": {"defect": other}}) for one, other in VERDICTS]
    assert said == list(VERDICTS.values())


VERDICTS = {
    (True, False): "repaired",
    (False, False): "not affected",
    (True, True): "not repaired",
    (False, True): "not repaired",
}
