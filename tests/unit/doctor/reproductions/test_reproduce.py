"""``gemma4-compat reproduce ID``: a script of upstream calls alone, which shows what the reproduction shows."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._doctor.reproductions import script
from tests.collecting import collect_failures
from tests.helpers import ON_A_GPU, Finished, child

PATCHES = {patch.id: patch for patch in gemma4_compat.patches()}
#: Their reproductions use a part of the repair: what it decides, or counts.
REFUSED = {
    "accelerate-nested-map",
    "peft-quantized-experts",
    "transformers-chunked-loss",
    "transformers-chunked-mlp",
    "transformers-deferred-stop",
    "transformers-graph-decoding",
    "transformers-packed-layers",
    "transformers-quantize-offloaded",
    "transformers-quantized-experts",
    "transformers-reuse-prefix",
}
SAMPLE = ("accelerate-move-offloaded", "transformers-tied-head")


def unknown(table: symtable.SymbolTable, known: set[str]) -> Iterator[str]:
    """Global names that nothing defines."""
    for symbol in table.get_symbols():
        if symbol.is_global() and symbol.get_name() not in known and not hasattr(builtins, symbol.get_name()):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from unknown(inner, known)


@collect_failures(patch_id=sorted(set(PATCHES) - REFUSED))
def test_a_script_is_whole_and_has_nothing_of_this_package(patch_id: str) -> None:
    text = script.script(PATCHES[patch_id])
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            assert not any(name.startswith("gemma4_compat") for name in names)
    table = symtable.symtable(text, "bug.py", "exec")
    known = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    known |= {inner.get_name() for inner in table.get_children()} | {"__name__", "__file__"}
    assert set(unknown(table, known)) - {"reveal_type"} == set()


@collect_failures(patch_id=sorted(REFUSED))
def test_what_needs_a_part_of_the_repair_is_refused_in_one_line(patch_id: str) -> None:
    done = CliRunner().invoke(cli.app, ["reproduce", patch_id])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"`gemma4-compat doctor {patch_id}` runs it" in done.stderr


def test_a_report_says_what_why_and_where() -> None:
    done = CliRunner().invoke(cli.app, ["reproduce", "peft-clippable-linear", "--report"])
    assert done.exit_code == 0
    for part in ("**What happens.**", "**Why.**", "**Where.**", "**To reproduce.**", "Gemma4ClippableLinear"):
        assert part in done.stdout


def test_an_unknown_id_is_one_line() -> None:
    done = CliRunner().invoke(cli.app, ["reproduce", "peft-clippable"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "did you mean 'peft-clippable-linear'?" in done.stderr


def cases() -> list[Any]:
    runnable = [patch_id for patch_id in PATCHES if patch_id not in REFUSED and patch_id not in ON_A_GPU]
    return [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.full) for name in runnable]


@pytest.mark.parametrize("patch_id", cases())
def test_a_script_shows_the_defect_where_the_reproduction_does(
    patch_id: str, reproduce: Any, warm_child: Callable[..., Finished], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    file, start = tmp_path / "bug.py", tmp_path / "start.py"
    file.write_text(script.script(PATCHES[patch_id]), encoding="utf-8")
    run_it = f"runpy.run_path({str(file)!r}, run_name='__main__')"
    start.write_text(f"import sys, runpy\nsys.modules['gemma4_compat'] = None\n{run_it}\n", encoding="utf-8")
    # Those of the fast suite as a user runs them; the others in forks of a process that has the libraries as they are.
    run = child if patch_id == SAMPLE[0] else warm_child
    done = run(str(start), environment={"GEMMA4_COMPAT_DISABLE": "all"}, timeout=600)
    expected = reproduce(patch_id, shim="off")
    assert done.code == int(expected["defect"]), done.stdout + done.stderr
