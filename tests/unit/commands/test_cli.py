"""The command line, in this process where it only reads and in a child where imports or exit codes matter."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._engine.io import address
from gemma4_compat._engine.reports import words
from gemma4_compat.patches import registry
from tests.collecting import collect_failures
from tests.helpers import Finished, child
from tests.unit.engine.test_import_cost import UPSTREAM, imported_by
from tests.unit.gemma4.adapters.adapter_files import lora, write_adapter

PATCHES = gemma4_compat.patches()
IDS = [patch.id for patch in PATCHES]


def cli_says(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(option: str) -> None:
    assert cli_says(option).stdout == f"{gemma4_compat.__version__}\n"


def test_status_has_a_line_for_each_patch_when_asked() -> None:
    lines = cli_says("status", "--verbose").stdout.partition("\n\n")[0].splitlines()
    assert [re.split(r" {2,}", line)[:2] for line in lines] == [
        [patch_id, words.of(status).word] for patch_id, status in gemma4_compat.status().items()
    ]
    assert all(line.endswith(status.reason) for line, status in zip(lines, gemma4_compat.status().values()))


def test_status_is_a_screen() -> None:
    lines = cli_says("status").stdout.splitlines()
    assert len(lines) <= 24
    assert {line.split()[0] for line in lines if line} >= {patch.area for patch in gemma4_compat.patches()}


@pytest.mark.parametrize("part, options", [(0, []), (1, ["--verbose"])])
def test_status_says_what_it_is_about(part: int, options: list[str]) -> None:
    said = cli_says("status", *options).stdout.split("\n\n")[part]
    states = [words.of(status).word for status in gemma4_compat.status().values()]
    counts = ", ".join(f"{states.count(word)} {word}" for word in dict.fromkeys(states))
    assert said.startswith(f"What a program of this environment would get: {counts}. ")
    assert "gemma4_compat.status() says what it got." in said


def test_status_as_json() -> None:
    data = json.loads(cli_says("status", "--json").stdout)["patches"]
    assert [item["id"] for item in data] == IDS
    for item, status in zip(data, gemma4_compat.status().values()):
        known = {"id", "state", "reason_code", "reason", "versions", "late", "overridden", "unmet", "unreached"}
        assert set(item) == known
        assert item["reason_code"] == status.reason_code
        assert item["state"] == status.state
        assert item["versions"] == dict(status.versions)


def test_status_imports_no_library() -> None:
    loaded = imported_by("import sys; sys.argv[1:] = ['status']; from gemma4_compat.cli import main; main()")
    assert "gemma4_compat.cli" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(UPSTREAM)


def test_status_says_what_was_disabled() -> None:
    environment = {"GEMMA4_COMPAT_DISABLE": "all"}
    done = child("-m", "gemma4_compat", "status", "--json", environment=environment)
    assert done.code == 0
    assert {item["reason"] for item in json.loads(done.stdout)["patches"]} == {"disabled by GEMMA4_COMPAT_DISABLE"}


def test_list_is_a_screen_of_areas() -> None:
    lines = cli_says("list").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    areas = {registry.AREA_OF[patch_id] for patch_id in IDS}
    counts = {line.split()[0]: line.split()[1] for line in lines if line and line.split()[0] in areas}
    assert counts == {area: str(list(registry.AREA_OF.values()).count(area)) for area in areas}
    assert f"{len(PATCHES)} patches. " in lines[-1]


def test_list_takes_an_area() -> None:
    expected = [patch.id for patch in PATCHES if patch.area == "offload"]
    assert [line.split()[0] for line in cli_says("list", "offload").stdout.splitlines()] == expected
    data = json.loads(cli_says("list", "offload", "--json").stdout)["patches"]
    assert [item["id"] for item in data] == expected


def test_list_has_a_line_for_each_patch() -> None:
    lines = cli_says("list", "--verbose").stdout.splitlines()
    for line, patch in zip(lines, PATCHES, strict=True):
        assert line.split()[0] == patch.id
        assert line.split()[1] == registry.AREA_OF[patch.id]
        assert f"{patch.distribution} {patch.affected}" in line
        assert line.endswith(patch.summary)


def test_list_as_json() -> None:
    for item, patch in zip(json.loads(cli_says("list", "--json").stdout)["patches"], PATCHES, strict=True):
        assert item["id"] == patch.id
        assert item["area"] == registry.AREA_OF[patch.id]
        assert item["failure_points"] == list(patch.failure_points)
        assert item["targets"] == [str(target) for target in patch.targets]
        assert item["severity"] == patch.severity
        assert item["documentation"]


@collect_failures(patch=PATCHES)
def test_explain_tells_everything_about_a_patch(patch: gemma4_compat.Patch) -> None:
    text = explained(patch.id)
    for part in (patch.summary, patch.affected, patch.measured, patch.documentation, *map(str, patch.targets)):
        assert part in text
    assert text.startswith(f"{patch.id} ({registry.AREA_OF[patch.id]})\n")
    assert f"GEMMA4_COMPAT_DISABLE={patch.id}" in text
    assert f"{words.of(known_states()[patch.id]).word}: " in text


@functools.cache
def explained(patch_id: str) -> str:
    """Each is asked once, of states that were asked once: that looks at the whole heap."""
    statuses = known_states()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gemma4_compat, "status", lambda: statuses)
        return str(cli_says("explain", patch_id).stdout)


@functools.cache
def known_states() -> Any:
    return gemma4_compat.status()


@collect_failures(area=sorted({registry.AREA_OF[patch_id] for patch_id in IDS}))
def test_explain_tells_everything_about_the_patches_of_an_area(area: str) -> None:
    expected = [patch_id for patch_id in IDS if registry.AREA_OF[patch_id] == area]
    data = json.loads(cli_says("explain", area, "--json").stdout)["patches"]
    assert [item["id"] for item in data] == expected
    assert {item["area"] for item in data} == {area}
    assert [item["status"]["id"] for item in data] == expected
    text = cli_says("explain", area).stdout
    index, _, whole = text.partition("\n\n")
    assert index.split("\n")[0].startswith(f"{len(expected)} patches of {area}; ")
    assert sorted(" ".join(index.split("\n")[1:]).split()) == sorted(expected)
    assert len(index.split("\n")) <= 20, "it fits a screen"
    assert whole == "\n".join(explained(patch_id) for patch_id in expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["doctor", "peft-keep-dispach"],
            "no patch has the id 'peft-keep-dispach'; did you mean 'peft-keep-dispatch'?",
        ),
        (
            ["explain", "peft-keep-dispach"],
            "no patch and no area is called 'peft-keep-dispach'; did you mean 'peft-keep-dispatch'?",
        ),
        (["list", "offlod"], "no area is called 'offlod'; did you mean 'offload'?"),
        (["explain", "quantisation"], "no patch and no area is called 'quantisation'; did you mean 'quantization'?"),
        (
            ["explain", "F2000"],
            "no patch and no area is called 'F2000'; areas are adapters, checkpoints, generation, multimodal, "
            "offload, placement, quantization, training, and `gemma4-compat list --verbose` shows every id.",
        ),
    ],
)
def test_an_unknown_name_is_bad_usage_and_the_error_names_what_is_known(arguments: list[str], message: str) -> None:
    result = cli_says(*arguments, code=2)
    assert result.stderr == f"gemma4-compat: {message}\n"
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["nonsense"], ["status", "--nonsense"], ["explain"], ["status", "extra"]])
def test_bad_usage_exits_2_and_says_so_on_stderr(arguments: list[str]) -> None:
    result = cli_says(*arguments, code=2)
    assert "Error" in result.stderr
    assert result.stdout == ""


def test_without_a_command_the_help_is_shown() -> None:
    output = cli_says(code=2).output
    for command in ("doctor", "status", "list", "explain", "plan", "scan"):
        assert command in output


def test_python_m_is_the_same_command() -> None:
    done = child("-m", "gemma4_compat", "--version")
    assert (done.code, done.stdout.strip()) == (0, gemma4_compat.__version__)


# ----------------------------------------------------------------------------------------------- without the libraries


def closure(names: list[str]) -> Iterator[metadata.Distribution]:
    """The distributions of these names and everything they require, extras left out."""
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a requirement for another platform
        yield distribution
        required = map(Requirement, distribution.requires or ())
        waiting += [item.name for item in required if not item.marker or item.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder with what the command line needs, and none of the libraries."""
    folder = tmp_path_factory.mktemp("bare")
    for distribution in closure(["msgspec", "packaging", "typer", "wrapt"]):
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for source in (Path(str(distribution.locate_file(top))) for top in tops):
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / source.name)
    return folder


def in_bare(bare: Path, *arguments: str) -> Finished:
    return child("-m", "gemma4_compat", *arguments, path=[bare], isolated=True)


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["doctor", "peft-keep-dispatch"]])
def test_doctor_without_the_libraries_exits_2_and_says_how_to_get_them(bare: Path, arguments: list[str]) -> None:
    done = in_bare(bare, *arguments)
    assert done.code == 2
    assert done.stdout == ""
    assert "torch, transformers, accelerate, peft, bitsandbytes not installed" in done.stderr
    assert address.install("stack") in done.stderr
    assert "Traceback" not in done.stderr


def test_status_without_the_libraries_says_that_they_are_absent(bare: Path) -> None:
    done = in_bare(bare, "status", "--json")
    assert (done.code, done.stderr) == (0, "")
    for item, patch in zip(json.loads(done.stdout)["patches"], PATCHES, strict=True):
        assert (item["state"], item["reason"]) == ("skipped", f"{patch.distribution} is not installed")


def test_scan_without_the_libraries_reads_an_adapter_and_says_what_a_base_needs(bare: Path, tmp_path: Path) -> None:
    folder = str(write_adapter(tmp_path, lora("model.layers.0.self_attn.q_proj")))
    done = in_bare(bare, "scan", folder, "--json")
    assert (done.code, done.stderr) == (0, "")
    assert json.loads(done.stdout)["keys"] == {"text": 2}
    done = in_bare(bare, "scan", folder, "E2B")
    assert (done.code, done.stdout) == (2, "")
    assert "torch is not installed" in done.stderr
    assert address.install("stack") in done.stderr
    assert "Traceback" not in done.stderr


def test_check_without_the_libraries_exits_2_and_says_how_to_get_them(bare: Path) -> None:
    done = in_bare(bare, "check")
    assert (done.code, done.stdout) == (2, "")
    assert "not installed; a check needs torch, transformers, accelerate, peft, bitsandbytes." in done.stderr
    assert address.install("stack") in done.stderr


def test_plan_without_the_libraries_exits_2_and_says_how_to_get_them(bare: Path) -> None:
    done = in_bare(bare, "plan", "E2B", "--vram", "8GiB")
    assert (done.code, done.stdout) == (2, "")
    assert "torch is not installed" in done.stderr
    assert address.install("stack") in done.stderr
    assert "Traceback" not in done.stderr
