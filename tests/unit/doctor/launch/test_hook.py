"""What a Python that starts imports: little, and nothing of the user's is lost by it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import packaging
import pytest

import gemma4_compat
from gemma4_compat._doctor.launch import environment
from gemma4_compat._doctor.launch.hook import _gemma4_compat_hook as hook
from tests.unit.doctor.launch.conftest import REPORT

THREADS = """
import sys, threading
barrier = threading.Barrier(8)
def load(name):
    barrier.wait()
    __import__(name)
threads = [threading.Thread(target=load, args=(name,)) for name in ("peft", "accelerate") * 4]
for thread in threads: thread.start()
for thread in threads: thread.join(30)
import gemma4_compat
armed = all(status.state != "registered" for status in gemma4_compat.status().values())
print(armed, "_gemma4_compat_hook" in [type(finder).__module__ for finder in sys.meta_path])
"""


def start(*arguments: str, path: list[Path], python: str = sys.executable, **variables: str) -> tuple[int, str, str]:
    """A Python with the hook on its search path, and ``path`` behind it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GEMMA4_COMPAT_"))}
    search = os.pathsep.join(map(str, [environment.HOOK, *path]))
    environ = kept | {"PYTHONPATH": search} | variables
    done = subprocess.run([python, *arguments], env=environ, cwd="/", capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def root() -> Path:
    return Path(gemma4_compat.__file__).parents[1]


def test_it_knows_the_libraries_that_are_repaired() -> None:
    assert {patch.distribution for patch in gemma4_compat.patches()} <= hook.LIBRARIES
    targets = {target.module.partition(".")[0] for patch in gemma4_compat.patches() for target in patch.targets}
    # torch alone needs no repair: what is replaced in it is for weights of bitsandbytes, which is imported for them.
    assert targets == {*hook.LIBRARIES, "torch"}


def test_any_python_can_read_it() -> None:
    text = (environment.HOOK / "sitecustomize.py").read_text(encoding="ascii")
    ast.parse(text, feature_version=(3, 4))
    assert "f'" not in text
    assert 'f"' not in text


def test_a_program_without_the_libraries_imports_nothing_of_this(root: Path) -> None:
    code = "import sys, json; print([name for name in sys.modules if 'gemma4_compat' in name])"
    assert start("-c", code, path=[root]) == (0, "['_gemma4_compat_hook']\n", "")


def test_the_users_own_sitecustomize_runs_once_and_is_itself(tmp_path: Path, root: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own', __name__, __spec__.origin)\n", encoding="utf-8")
    code = "import sys, sitecustomize as s; print(s.__file__, s is sys.modules['sitecustomize'])"
    file = tmp_path / "sitecustomize.py"
    assert start("-c", code, path=[tmp_path, root]) == (0, f"own sitecustomize {file}\n{file} True\n", "")


def test_without_one_there_is_none(root: Path) -> None:
    if find_spec("sitecustomize") is not None:
        pytest.skip("this Python has a sitecustomize of its own, as Debian's does")
    code = "import sys; print('sitecustomize' in sys.modules); import sitecustomize"
    done = start("-c", code, path=[root])
    assert done[:2] == (1, "False\n")
    assert done[2].endswith("ModuleNotFoundError: No module named 'sitecustomize'\n")


@pytest.mark.parametrize("text", ["1 / 0\n", "import no_such_module\n"])
def test_an_error_of_it_is_what_it_is_without(text: str, tmp_path: Path, root: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
    code = "import sys; print('sitecustomize' in sys.modules)"
    within = start("-c", code, path=[tmp_path, root])
    without = start("-c", code, path=[root], PYTHONPATH=str(tmp_path))
    assert within == without
    assert "Error in sitecustomize" in without[2]


def test_another_tool_that_came_first_is_not_called_again(tmp_path: Path, root: Path) -> None:
    """ddtrace-run has a sitecustomize before this one, which looks for the next by itself."""
    first, last = tmp_path / "first", tmp_path / "last"
    for folder in (first, last):
        folder.mkdir()
    (first / "sitecustomize.py").write_text(
        "import sys, importlib.machinery as m, importlib.util as u\nprint('first')\n"
        "spec = m.PathFinder.find_spec('sitecustomize', sys.path[1:])\n"
        "sys.modules['sitecustomize'] = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(sys.modules['sitecustomize'])\n",
        encoding="utf-8",
    )
    (last / "sitecustomize.py").write_text("print('last')\n", encoding="utf-8")
    search = os.pathsep.join(map(str, [first, environment.HOOK, last, root]))
    code, out, error = start(
        "-c", "import sys; print('_gemma4_compat_hook' in sys.modules)", path=[], PYTHONPATH=search
    )
    assert (code, out, error) == (0, "first\nlast\nTrue\n", "")


def neighbours(folder: Path, *packages: object) -> Path:
    """A site-packages with this package and others; the hook in it."""
    folder.mkdir()
    for package in (gemma4_compat, *packages):
        source = Path(package.__file__).parent  # type: ignore[attr-defined]
        (folder / source.name).symlink_to(source, target_is_directory=True)
    return folder / "gemma4_compat" / "_doctor" / "launch" / "hook"


def test_a_python_that_lacks_the_shim_takes_the_one_beside_the_hook(bare: Path, peft: Path, tmp_path: Path) -> None:
    found = neighbours(tmp_path / "site", packaging)
    search = os.pathsep.join(map(str, [found, peft]))
    code = REPORT + f"print([path for path in sys.path if {str(tmp_path)!r} in path])"
    assert start("-c", code, path=[], python=str(bare), PYTHONPATH=search) == (0, "armed\n[]\n", "")


def test_where_it_cannot_be_armed_the_import_says_so_once(bare: Path, peft: Path, tmp_path: Path) -> None:
    """And a Python that imports no library says nothing."""
    search = os.pathsep.join(map(str, [neighbours(tmp_path / "site"), peft]))
    code = "import peft, importlib; print(importlib.reload(peft).__name__)"
    done = start("-c", code, path=[], python=str(bare), PYTHONPATH=search)
    assert done[:2] == (0, "peft\n")
    assert done[2].startswith("gemma4-compat: nothing is repaired in this process: No module named 'packaging'")
    assert done[2].count("\n") == 1
    assert f"{bare} -m pip install packaging" in done[2]
    assert start("-c", "import json", path=[], python=str(bare), PYTHONPATH=search) == (0, "", "")
    strict = start("-c", code, path=[], python=str(bare), PYTHONPATH=search, GEMMA4_COMPAT_STRICT="1")
    assert (strict[0], "ModuleNotFoundError: No module named 'packaging'" in strict[2]) == (1, True)


def test_threads_that_import_at_once_are_all_armed(peft: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "accelerate.py").write_text("", encoding="utf-8")
    assert start("-c", THREADS, path=[peft, tmp_path, root])[:2] == (0, "True False\n")


def test_what_arming_raises_every_import_of_a_library_raises(peft: Path, root: Path, tmp_path: Path) -> None:
    """Else whoever swallows the first one, as optional imports do, goes on unpatched."""
    (tmp_path / "pyproject.toml").write_text("[tool.gemma4_compat]\nstrict = 'maybe'\n", encoding="utf-8")
    code = (
        f"import os; os.chdir({str(tmp_path)!r})\nfor _ in range(3):\n    try: import peft\n"
        "    except RuntimeError as error: print(type(error).__name__)"
    )
    assert start("-c", code, path=[peft, root]) == (0, "Gemma4CompatError\n" * 3, "")


def test_a_warning_of_the_shim_names_the_line_that_imports(peft: Path, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("\n\nimport peft\n", encoding="utf-8")
    _, _, error = start(str(file), path=[peft, root], GEMMA4_COMPAT_DISABLE="no-such-id")
    assert error.startswith(f"{file}:3: Gemma4CompatWarning: GEMMA4_COMPAT_DISABLE: no patch has the id 'no-such-id'")
