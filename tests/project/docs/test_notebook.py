"""The notebook is executed in a kernel of its own, and says what it should."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.full

#: What a notebook prints.
SAID = {
    "tiny_tour.ipynb": (
        "largest difference of logits: 0.0, same tokens: True",
        "ValueError: position_embedding_table is on the meta device",  # what upstream does
        "accelerate-nested-map (placement; F14 of docs/FAILURE_POINTS.md)",
        " not needed, ",
        "Gemma4ForConditionalGeneration.from_pretrained(",
    ),
    "t4_float16.ipynb": ("logits are finite: True", "losses fall: True", "problems: []"),
}
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def said(notebook: Any) -> str:
    return "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()) if "text" in output
    )


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in NOTEBOOKS])
def test_the_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install 'gemma4-compat[test]'")
    pytest.importorskip("ipykernel", reason="needs ipykernel: pip install 'gemma4-compat[test]'")
    import nbformat

    # A kernel of this interpreter, wherever others are registered; it finds this checkout.
    kernels = tmp_path / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    specification = {"argv": command, "display_name": "Python 3", "language": "python"}
    (kernels / "kernel.json").write_text(json.dumps(specification), encoding="utf-8")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    text = said(notebook)
    assert [expected for expected in SAID[path.name] if expected not in text] == []


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in NOTEBOOKS])
def test_the_notebook_is_committed_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []
