"""A torchvision that was built for another torch: every command, ``explain`` and the examples say what to do."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._doctor.explain import imports
from gemma4_compat._engine import versions
from tests.helpers import child

pytest.importorskip("transformers")

CAUSE = "torchvision 0.20.1 was built for torch 2.5.1, and torch"
REMEDY = f"pip install torch=={(versions.installed('torch') or '').partition('+')[0]} torchvision"
#: What the real one does while it is imported.
REGISTRATIONS = """
import torch


@torch.library.register_fake("torchvision::nms")
def meta_nms(dets, scores, iou_threshold):
    return dets.new_empty((0,), dtype=torch.long)
"""


@pytest.fixture
def torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a torchvision that cannot be imported with this torch, first on the path here and in children."""
    package, metadata = tmp_path / "torchvision", tmp_path / "torchvision-0.20.1.dist-info" / "METADATA"
    package.mkdir()
    (package / "__init__.py").write_text("from torchvision import _meta_registrations\n")
    (package / "_meta_registrations.py").write_text(REGISTRATIONS)
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.20.1\nRequires-Dist: torch (==2.5.1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return metadata


@pytest.mark.parametrize("command", ["status", "env", "env --json"])
def test_what_imports_nothing_says_it(torchvision: Path, command: str) -> None:
    done = CliRunner().invoke(cli.app, command.split())
    said = " ".join(done.output.split())
    assert done.exit_code == 0
    assert CAUSE in said
    assert REMEDY in said


COMMANDS = [
    "plan E2B --vram 8GiB",
    pytest.param("plan-training E2B --vram 8GiB", marks=pytest.mark.full),
    pytest.param("scan adapter E2B", marks=pytest.mark.full),
    pytest.param("export adapter out --for vllm --base E2B", marks=pytest.mark.full),
    pytest.param("merge model adapter out", marks=pytest.mark.full),
    pytest.param("chat model", marks=pytest.mark.full),
    pytest.param("serve model --port 0", marks=pytest.mark.full),
    pytest.param("check", marks=pytest.mark.full),
    pytest.param("doctor peft-keep-dispatch", marks=pytest.mark.full),
    pytest.param("doctor --show peft-adapter-keys", marks=pytest.mark.full),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_what_imports_fails_with_it(torchvision: Path, command: str) -> None:
    data = Path(__file__).parents[2] / "data" / "trained_model"
    if not data.exists() and re.search("adapter |model", command):
        pytest.skip("the trained model is not in the sdist")
    words = [str(data / word) if word in ("adapter", "model") else word for word in command.split()]
    done = child("-m", "gemma4_compat", *words, timeout=200)
    assert done.code == (1 if "--show" in command else 2)
    said = done.stderr + done.stdout
    assert "None" not in said
    assert "torchvision" in said
    assert re.search(r"pip install torch==\S+ torchvision", said)


def test_a_program_that_is_started_is_warned(torchvision: Path) -> None:
    done = child("-m", "gemma4_compat", "run", "-c", "print('began')")
    assert (done.code, done.stdout) == (0, "began\n")
    assert CAUSE in done.stderr


def test_the_error_and_its_traceback_are_explained(torchvision: Path) -> None:
    """Frames of modules that are imported go through files that patches concern, and not through their code."""
    done = child("-c", "import gemma4_compat; from transformers import Gemma4ForConditionalGeneration")
    assert done.stderr.count("Traceback") > 1
    ends = done.stderr.index("RuntimeError: operator torchvision::nms does not exist")
    for text in (done.stderr, done.stderr[: done.stderr.index("\n", ends)]):
        found = gemma4_compat.explain(text)
        assert found.patches == ()
        assert "was built for another torch" in str(found.advice)


@pytest.mark.full
@pytest.mark.parametrize("example", ["small_card_chat", "qlora_small_card", "grpo_small_card"])
def test_an_example_says_it(torchvision: Path, tmp_path: Path, example: str) -> None:
    script = Path(__file__).parents[3] / "examples" / f"{example}.py"
    given = ["--prompt", "hello"] if example == "small_card_chat" else ["--out", str(tmp_path / "out")]
    done = child(str(script), *given)
    assert done.code == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "pip install torch==RELEASE torchvision" in done.stderr


@pytest.mark.parametrize(
    "required, release, torch, found",
    [
        ("torch==2.13.0", "0.28.0", "2.13.0", None),
        ("torch==2.13.0", "0.28.0+cpu", "2.13.0+cpu", None),
        ("torch (==2.13.0)", "0.28.0", "2.13.0+cu130", None),
        ("torch", "0.28.0a0+abc", "2.13.0a0+def", None),
        ("torch==2.13.0", "0.28.0", "2.13.0+cpu", "built for a torch for GPUs"),
        ("torch==2.13.0", "0.28.0+cpu", "2.13.0+cu130", "built for a torch for CPUs"),
        ("torch==2.11.0", "0.26.0", "2.13.0", "built for torch 2.11.0"),
    ],
)
def test_metadata(
    torchvision: Path, monkeypatch: pytest.MonkeyPatch, required: str, release: str, torch: str, found: str | None
) -> None:
    head = f"Metadata-Version: 2.1\nName: torchvision\nVersion: {release}\n"
    torchvision.write_text(f"{head}Requires-Dist: numpy\nRequires-Dist: {required}\n")
    monkeypatch.setattr(versions, "installed", {"torchvision": release, "torch": torch}.get)
    said = imports.torchvision()
    assert (said is None) == (found is None)
    assert found is None or found in str(said)
