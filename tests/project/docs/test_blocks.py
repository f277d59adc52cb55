"""Every code block of the documentation runs: Python as it is written, transcripts with the output they show, shell
commands at least exist with the options they are given. tests/project/docs/stand_ins.py says what stands for a hub
and a card.
"""

from __future__ import annotations

import contextlib
import doctest
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from tests.project.docs import commands, reading, stand_ins

try:
    import tomllib
except ImportError:
    import tomli as tomllib

BLOCKS = [block for page in reading.PAGES for block in reading.blocks(page)]
PYTHON = list(dict.fromkeys(block.page for block in BLOCKS if block.language == "python"))
#: Pages whose blocks take long, or are those of the README; the others are in the fast suite.
SLOW = ("TRAINING.md", "index.md")
#: Our own commands that are cheap and write nothing: those of ``bash`` blocks are also run.
CHEAP = ("plan", "scan", "needed", "status", "list", "explain")


#: Columns of code that fit beside the navigation on a screen of 1,280 pixels (docs/site.css).
WIDEST = 95


def of(language: str, slow: tuple[str, ...] = ()) -> list[Any]:
    return [
        pytest.param(block, id=block.name, marks=[pytest.mark.full] * (block.page.name in slow))
        for block in BLOCKS
        if block.language == language
    ]


@pytest.fixture(scope="session")
def working_folder(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins.build(tmp_path_factory.mktemp("documentation") / "folder", workspace)


@pytest.fixture
def inside(working_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The documentation's working folder; afterwards the shim is on and the dice are as they were."""
    import torch

    dice, state = torch.get_rng_state(), random.getstate()
    stand_ins.enter(working_folder, tmp_path / "here", monkeypatch)
    yield
    gemma4_compat.install()
    torch.set_rng_state(dice)
    random.setstate(state)


def test_code_fits_a_screen() -> None:
    """What is to be copied; transcripts show what is printed."""
    blocks = [block for block in BLOCKS if block.language in ("python", "bash", "yaml")]
    wide = {(block.name, line) for block in blocks for line in block.code.splitlines() if len(line) > WIDEST}
    assert wide == set()


def run_page(page: Path) -> None:
    """All Python of a page, in order: a block may use the names of those above it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with stand_ins.server() if page.name == "SERVING.md" else contextlib.nullcontext():
        for block in reading.blocks(page):
            if block.language == "python":
                exec(compile("\n" * block.line + block.code, str(page), "exec"), names)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.name, marks=[pytest.mark.full] * (page.name in SLOW)) for page in PYTHON]
)
@pytest.mark.usefixtures("inside")
@pytest.mark.filterwarnings("default::gemma4_compat.Gemma4CompatWarning")
def test_python_runs_as_it_is_written(page: Path) -> None:
    run_page(page)


@pytest.mark.parametrize("block", of("bash"))
def test_shell_commands_exist_with_these_options(block: reading.Block) -> None:
    found = list(commands.parts(block.code))
    assert found
    for words in found:
        commands.check(words)


@pytest.mark.parametrize("block", of("bash", slow=SLOW))
@pytest.mark.usefixtures("inside")
def test_cheap_commands_run(block: reading.Block) -> None:
    for words in commands.parts(block.code):
        if words[0] == "gemma4-compat" and words[1] in CHEAP:
            done = CliRunner().invoke(cli.app, words[1:])
            assert done.exit_code == 0, done.output


@pytest.mark.parametrize("block", of("console"))
@pytest.mark.usefixtures("inside")
def test_transcripts_show_what_is_printed(block: reading.Block) -> None:
    command, _, shown = block.code.removeprefix("$ gemma4-compat ").partition("\n")
    assert command != block.code, "a transcript starts with $ gemma4-compat"
    done = CliRunner().invoke(cli.app, command.split())
    assert done.exit_code == 0, done.output
    if stand_ins.versions_are("newest"):
        options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(shown.strip(), done.output.strip(), options), done.output


@pytest.mark.parametrize(
    "language, read", [("toml", tomllib.loads), ("json", json.loads), ("yaml", lambda text: _yaml(text))]
)
def test_data_can_be_read(language: str, read: Callable[[str], Any]) -> None:
    for block in BLOCKS:
        if block.language == language:
            assert read(block.code), block.name


def _yaml(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


def test_no_block_is_of_a_kind_that_is_not_run() -> None:
    run = {"python", "bash", "console", "toml", "json", "yaml"}
    others = [f"{block.name} {block.language}" for block in BLOCKS if block.language not in run]
    # One line that a load prints, held by tests/patches/quantization/test_transformers_quantized_experts.py.
    assert [name.partition(":")[0] for name in others] == ["QUANTIZATION.md"], others


@pytest.mark.parametrize(
    "code, message",
    [
        ("gemma4-compat pan E4B", "no command 'pan'"),
        ("gemma4-compat plan E4B --vrma 4GiB", "vrma"),
        ("pip install .[everything]", "no extra 'everything'"),
        ("pip install gemma4-compat", "on an index"),
        ("pip install -c constraints/old.txt .", "there is no constraints/old.txt"),
        ("python benchmarks/nothing.py", "there is no benchmarks/nothing.py"),
        ("python -m tests.generated.fuzz --everything", "no option --everything"),
        ("python -m pytest tests/nothing", "there is no tests/nothing"),
        ("nox -s nothing", "no session 'nothing'"),
        ("X=1 make all  # a comment", "'make'"),
    ],
)
def test_a_command_that_cannot_work_is_refused(code: str, message: str) -> None:
    (words,) = commands.parts(code)
    with pytest.raises(commands.UnknownCommandError, match=message):
        commands.check(words)


def test_an_undefined_name_is_a_failure(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text("# Page\n\n```python\nprint(model)\n```\n", encoding="utf-8")
    with pytest.raises(NameError, match="model"):
        run_page(page)
