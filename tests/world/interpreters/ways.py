"""The ways in which the case is run: each says how, given the size, the samples and the folders for ``sys.path``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipapp
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CASE = Path(__file__).with_name("case.py")


@dataclass(frozen=True)
class Given:
    """What a way of running the case gets.

    Attributes:
        python: the interpreter.
        size: ``model`` or ``stub``.
        samples: the folder with the tiny checkpoint and its adapters.
        scratch: an empty folder.
    """

    python: str
    size: str
    samples: Path
    scratch: Path

    @property
    def arguments(self) -> list[str]:
        """Of the case."""
        return [self.size, str(self.samples)]

    def script(self, text: str) -> list[str]:
        """A command that runs this program; ``CASE`` in it is the module."""
        file = self.scratch / "program.py"
        setup = f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(CASE.parent)!r}]\nSIZE, SAMPLES = sys.argv[1:]\n"
        file.write_text(setup + text, encoding="utf-8")
        return [self.python, str(file), *self.arguments]


def _with(*options: str) -> Callable[[Given], list[str]]:
    return lambda given: [given.python, *options, str(CASE), *given.arguments, str(ROOT)]


def _copied(to: Path) -> Path:
    """A folder with the package and the case as ``__main__.py``, as an application ships them."""
    shutil.copytree(ROOT / "gemma4_compat", to / "gemma4_compat", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CASE, to / "__main__.py")
    return to


def _zipapp(given: Given) -> list[str]:
    archive = given.scratch / "app.pyz"
    zipapp.create_archive(_copied(given.scratch / "app"), archive)
    return [given.python, str(archive), *given.arguments]


def _sourceless(given: Given) -> list[str]:
    folder = _copied(given.scratch / "app")
    subprocess.run([given.python, "-m", "compileall", "-q", "-b", str(folder)], check=True, timeout=120)
    for file in folder.rglob("*.py"):
        file.unlink()
    return [given.python, str(folder), *given.arguments]


def _pyinstaller(given: Given) -> list[str]:
    folder = _copied(given.scratch / "app")
    options = ["--noconfirm", "--log-level=ERROR", "--onedir", "--name=case", "--collect-all=gemma4_compat"]
    excluded = ["torch", "transformers", "accelerate", "peft", "bitsandbytes", "numpy", "PIL", "scipy", "tkinter"]
    options += [f"--exclude-module={name}" for name in (*excluded, "pytest", "matplotlib")]
    command = [given.python, "-m", "PyInstaller", *options, str(folder / "__main__.py")]
    subprocess.run(command, cwd=given.scratch, check=True, timeout=600, capture_output=True)
    return [str(given.scratch / "dist" / "case" / "case"), *given.arguments]


def _process(method: str) -> Callable[[Given], list[str]]:
    """In a child of a process that has armed the shim, and imported what there is to import."""
    text = f"""
import multiprocessing, case
import gemma4_compat
if __name__ == "__main__":
    if SIZE == "model":
        import peft, transformers
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        print(pool.apply(case.report, (SIZE, SAMPLES)))
"""
    return lambda given: given.script(text)


def _sub_interpreter(given: Given) -> list[str]:
    text = """
import gemma4_compat, os
try:
    import concurrent.interpreters as interpreters
except ImportError:
    try:
        import _interpreters as interpreters
    except ImportError:
        import _xxsubinterpreters as interpreters
program = (
    f"import sys; sys.path[:] = {sys.path!r}; sys.argv = ['case']; import case; "
    f"print(case.report({SIZE!r}, {SAMPLES!r}), flush=True)"
)
made = interpreters.create() if hasattr(interpreters, "Interpreter") else interpreters.create(**LEGACY)
failed = made.exec(program) if hasattr(made, "exec") else RUN(interpreters, made, program)
if failed is not None:
    raise SystemExit(str(failed))
"""
    # pydantic's extension modules need an interpreter of the old kind, which shares the GIL.
    helpers = """
LEGACY = {"config": "legacy"} if sys.version_info >= (3, 13) else {"isolated": False}
def RUN(interpreters, made, program):
    run = getattr(interpreters, "run_string")
    return run(made, program)
"""
    return given.script(helpers + text)


def _pytest(given: Given) -> list[str]:
    """With the asserts of the package rewritten as well, and warnings as errors."""
    (given.scratch / "conftest.py").write_text(
        f"import sys, pytest\nsys.path[:0] = [{str(ROOT)!r}, {str(CASE.parent)!r}]\n"
        "pytest.register_assert_rewrite('gemma4_compat', 'case')\n",
        encoding="utf-8",
    )
    (given.scratch / "test_case.py").write_text(
        "import json, warnings\nimport case\n\ndef test_it(capfd):\n"
        "    with warnings.catch_warnings():\n"
        "        warnings.simplefilter('error', __import__('gemma4_compat').Gemma4CompatWarning)\n"
        f"        found = case.report({given.size!r}, {str(given.samples)!r})\n"
        "    with capfd.disabled():\n        print('\\n' + found + '\\n')\n"
        "    assert 'error' not in json.loads(found)\n",
        encoding="utf-8",
    )
    return [given.python, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(given.scratch)]


def _jupyter(given: Given) -> list[str]:
    """In a cell of a notebook, with autoreload, after an edit that it has brought in."""
    text = """
import json, os, pathlib, tempfile, nbformat
from nbclient import NotebookClient
folder = pathlib.Path(__file__).parent
spec = folder / "kernels" / "this" / "kernel.json"
spec.parent.mkdir(parents=True)
command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
spec.write_text(json.dumps({"argv": command, "display_name": "this", "language": "python"}), encoding="utf-8")
os.environ.update(JUPYTER_PATH=str(folder), IPYTHONDIR=str(folder / "ipython"))
(folder / "mine.py").write_text("NUMBER = 1\\n", encoding="utf-8")
cells = [
    f"import sys; sys.path[:] = {sys.path!r}\\n%load_ext autoreload\\n%autoreload 2",
    "import mine, case, gemma4_compat",
    "import peft, transformers" if SIZE == "model" else "",
    "import os\\nopen('mine.py', 'w').write('NUMBER = 2\\\\n'); os.utime('mine.py', (2e9, 2e9))",
    f"assert mine.NUMBER == 2, 'no autoreload'\\nprint(case.report({SIZE!r}, {SAMPLES!r}))",
]
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
NotebookClient(notebook, kernel_name="this", timeout=600).execute(cwd=str(folder))
for output in notebook.cells[-1].outputs:
    print(output.get("text", ""), end="")
"""
    return given.script(text)


#: How to run it, by name.
WAYS: dict[str, Callable[[Given], list[str]]] = {
    "python": _with(),
    "-O": _with("-O"),
    "-OO": _with("-OO"),
    "-I": _with("-I"),
    "-W error": _with("-W", "error"),
    "zipapp": _zipapp,
    "no sources": _sourceless,
    "PyInstaller": _pyinstaller,
    "fork": _process("fork"),
    "spawn": _process("spawn"),
    "forkserver": _process("forkserver"),
    "sub-interpreter": _sub_interpreter,
    "pytest": _pytest,
    "Jupyter": _jupyter,
}
#: Ways that need a distribution which the tests do not: the import that tells, and what to install.
NEEDED = {"PyInstaller": ("PyInstaller", "pyinstaller"), "Jupyter": ("nbclient", "nbclient ipykernel")}
#: Ways in which only the small case is run, and why.
STUB_ONLY = {
    "-OO": "transformers cannot be imported: it reads its own docstrings",
    "-W error": "PEFT uses parts of transformers that warn; loading an adapter also fails without this package",
    "PyInstaller": "a program frozen with torch is several GB",
    "sub-interpreter": "numpy and torch load only in the main interpreter",
}


def environment() -> dict[str, str]:
    """For the interpreters: no settings of this package, nothing from the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GEMMA4_COMPAT_", "PYTHON"))}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONDONTWRITEBYTECODE": "1"}


def here() -> str:
    """The interpreter that runs."""
    return sys.executable
