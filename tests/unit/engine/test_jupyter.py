"""A real Jupyter kernel with ``%autoreload 2``: a notebook that edits the library which a patch is for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="needs nbclient: pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="needs ipykernel: pip install nbclient ipykernel")

import nbformat
from nbclient import NotebookClient

from tests.helpers import ROOT, Library

pytestmark = pytest.mark.full
_EDIT = """
from pathlib import Path
import itertools, os
_clock = itertools.count(10, 10)
def edit(before, after):
    file = Path(core.__file__)
    file.write_text(TEXT.replace(before, after))
    later = int(file.stat().st_mtime) + next(_clock)
    os.utime(file, (later, later))
"""


def run(folder: Path, *cells: str) -> list[str]:
    """What each cell printed, warnings included; an error in a cell is one here."""
    spec = folder / "jupyter" / "kernels" / "this" / "kernel.json"
    spec.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": command, "display_name": "this", "language": "python"}), encoding="utf-8")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, kernel_name="this", timeout=120).execute(cwd=str(folder))
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    return Library.create(tmp_path / "library")


@pytest.mark.parametrize("way", ["2", "2-"])
def test_edits_arrive_and_patches_stay(tmp_path: Path, library: Library, way: str) -> None:
    begin = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(library.folder)!r}]\n"
        f"%load_ext autoreload\n%autoreload {way}\n"
        "from tests.helpers import Library, CORE as TEXT, installed\nfrom pathlib import Path\n"
        f"library = Library(Path({str(library.folder)!r}), {library.name!r})\n"
        "engine = installed(library.patch(library.target()))"
    )
    show = "print(core.double(2), double(2), core.triple(2), engine.status()['fakelib-double'].state)"
    said = run(
        tmp_path,
        begin,
        f"from {library.name} import core\nfrom {library.name}.core import double\n{_EDIT}",
        show,
        "edit('x * 3', 'x * 33')",  # of another function
        show,
        "edit('Twice x.', 'Two x.')",  # of what the patch replaces, but not of its code
        show,
        "edit('x * times', 'x * times * 10')",  # of the code that the patch replaces
        show,
        show,
        "edit('', '')",
        "engine.install()",
        show,
        "engine.revert()",
        show,
    )
    patched = "('patched', 4) ('patched', 4)"
    assert said[2] == f"{patched} 6 applied\n"
    assert said[4] == f"{patched} 66 applied\n"
    assert said[6] == f"{patched} 6 applied\n"
    assert said[8].count("was not applied") == 1
    assert "40 40 6 failed\n" in said[8]
    assert said[9] == "40 40 6 failed\n"
    assert said[12].startswith("('patched', 4) ")
    assert said[12].endswith(" 6 applied\n")
    assert said[14].startswith("4 4 6 ")


def test_a_kernel_in_which_nothing_is_edited_keeps_every_patch(tmp_path: Path, library: Library) -> None:
    """Autoreload looks at every module before every cell: that alone says and changes nothing."""
    begin = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n%load_ext autoreload\n%autoreload 2\nimport gemma4_compat"
    show = "print(sorted((name, str(one.state)) for name, one in gemma4_compat.status().items()))"
    said = run(tmp_path, begin, "import peft, transformers.models.gemma4.modeling_gemma4", show, "1", show)
    assert said[0] == ""
    assert "'applied'" in said[2]
    assert "'failed'" not in said[2]
    assert said[4] == said[2]
