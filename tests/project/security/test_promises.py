"""SECURITY.md names a test for each of its promises, and what it says of the package's own code is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers import ROOT

TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
_PROMISED, _HELD = TEXT.split("## How that is tested")
_PACKAGE = sorted((ROOT / "gemma4_compat").rglob("*.py"))
_ROWS = dict(re.findall(r"^\| ([A-Z][^|]*) \| (.*) \|$", _HELD, re.MULTILINE))

#: Modules that may start a process: this interpreter with a program that is a constant, or a fork of it; and `run`,
#: the program that its user names.
_STARTERS = {
    "_engine/io/patterns.py",
    "_doctor/processes.py",
    "_doctor/reproductions/server.py",
    "_doctor/launch/environment.py",
    "_doctor/launch/program.py",
}
#: The modules that download and fetch, and only if they are told to.
_DOWNLOADS = "gemma4_compat/cli/check.py"
_FETCHES = "gemma4_compat/cli/serving/media.py"
_NETWORK = {"socket", "ssl", "http", "ftplib", "smtplib", "requests", "httpx", "urllib.request"}
#: Of the hub's client: what looks into the cache. The last one does so with ``local_files_only`` alone.
_CACHE = {"HFValidationError", "LocalEntryNotFoundError", "try_to_load_from_cache", "snapshot_download"}


def test_each_promise_has_its_tests() -> None:
    promises = re.findall(r"^\*\*([^*]+)\*\*", _PROMISED, re.MULTILINE)
    assert len(promises) > 5
    assert [promise.rstrip(".") for promise in promises] == list(_ROWS)


@pytest.mark.parametrize("promise", _ROWS)
def test_the_tests_that_are_named_exist(promise: str) -> None:
    named = re.findall(r"\[(tests/[^\]]+)\]\(\1\)((?:[:,] `test_\w+`)*)", _ROWS[promise])
    assert named
    for path, tests in named:
        text = (ROOT / path).read_text(encoding="utf-8")
        for test in re.findall(r"`(\w+)`", tests):
            assert f"def {test}(" in text, f"{path} has no {test}"
    assert len(re.findall("`test_", _ROWS[promise])) == sum(tests.count("`test_") for _, tests in named)


def made(text: str) -> Iterator[str]:
    """What makes or changes code in the text of a module, or reaches the network."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = all(isinstance(argument, ast.Constant) for argument in node.args)  # an import like any other
            if node.func.id in ("exec", "eval", "compile") or (node.func.id == "__import__" and not named):
                yield f"{node.func.id}() in line {node.lineno}"
            if node.func.id == "snapshot_download" and "local_files_only=True" not in ast.unparse(node):
                yield f"a download in line {node.lineno}"
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "__code__":
            yield f"__code__ is set in line {node.lineno}"
        elif isinstance(node, ast.Import):
            yield from (f"import of {item.name} in line {node.lineno}" for item in node.names if _reaches(item.name))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            cached = module.startswith("huggingface_hub") and {item.name for item in node.names} <= _CACHE
            if _reaches(module) and not cached:
                yield f"import of {module} in line {node.lineno}"


def _reaches(module: str) -> bool:
    return module in _NETWORK or module.partition(".")[0] in {*_NETWORK, "huggingface_hub"}


def test_the_package_makes_no_code() -> None:
    found = {str(file.relative_to(ROOT)): list(made(file.read_text(encoding="utf-8"))) for file in _PACKAGE}
    assert len(found) > 100
    some = {file: [re.sub(" in line .*", "", one) for one in what] for file, what in found.items() if what}
    assert some == {
        _DOWNLOADS: ["import of huggingface_hub.errors", "a download"],  # check --download
        # serve --allow-http and --media-host
        _FETCHES: ["import of http.client", "import of socket", "import of urllib.request"],
    }


@pytest.mark.parametrize(
    "text",
    [
        *(
            "exec('1')",
            "eval('1')",
            "__import__(name)",
            "f = compile('1', '', 'exec')",
            "f.__code__ = g",
            "import http.client",
        ),
        *("from huggingface_hub import hf_hub_download", "import huggingface_hub", "snapshot_download('a')"),
    ],
)
def test_what_makes_code_is_seen(text: str) -> None:
    assert list(made(text))


def test_processes_are_started_in_known_places() -> None:
    starts = re.compile(
        r"^\s*(?:import|from) (?:subprocess|multiprocessing|pty)\b|\bos\.(?:system|exec|spawn|fork)", re.M
    )
    folder = ROOT / "gemma4_compat"
    found = {str(file.relative_to(folder)) for file in _PACKAGE if starts.search(file.read_text(encoding="utf-8"))}
    assert found == _STARTERS
