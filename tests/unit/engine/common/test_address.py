"""How the package is installed is said in one place, ``_engine/io/address.py``, and works today."""

from __future__ import annotations

import re

import pytest

from gemma4_compat._doctor.explain import common_errors, messages
from gemma4_compat._engine.io import address
from tests.helpers import ROOT


def test_an_extra_is_what_pyproject_calls_so() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert address.install("package") == "pip install PATH-OF-A-CHECKOUT"
    for extra, names in address.EXTRAS.items():
        if extra == "package":
            continue
        block = re.search(rf"^{extra} = \[(.*?)\]", project, re.MULTILINE | re.DOTALL)
        assert block is not None
        assert tuple(re.findall(r'"([\w-]+)', block[1])) == names


def test_no_page_or_message_asks_an_index_for_a_package_that_it_does_not_have() -> None:
    assert not address.ON_INDEX, "on the day of a release: README, docs/index.md and the examples change as well"
    files = [*(ROOT / "gemma4_compat").rglob("*.py"), *(ROOT / "examples").glob("*"), ROOT / "README.md"]
    files += [
        *(ROOT / "gemma4_compat").rglob("*.json"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs").rglob("*.ipynb"),
    ]
    wrong = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        if file.is_file() and file.name != "address.py"
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"pip install (?:-\S+ )*[\"'\\]*gemma4-compat", line) and "--find-links" not in line
    ]
    assert wrong == []


@pytest.mark.parametrize("on_index", [False, True])
def test_messages_change_on_the_day_of_a_release(monkeypatch: pytest.MonkeyPatch, on_index: bool) -> None:
    monkeypatch.setattr(address, "ON_INDEX", on_index)
    common_errors.table.cache_clear()
    found = common_errors.advice(messages.read("ModuleNotFoundError: No module named 'torchvision'"))
    common_errors.table.cache_clear()
    assert found is not None
    wanted = "`pip install 'gemma4-compat[images]'`" if on_index else "`pip install pillow torchvision`"
    assert wanted in found.to_do
