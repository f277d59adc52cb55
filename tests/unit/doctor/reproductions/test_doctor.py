"""How doctor judges what its children report, and what it says to the shell. The children themselves are faked."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Verdict, _shim, cli
from gemma4_compat._doctor.reproductions import children as _children
from gemma4_compat._doctor.reproductions import findings
from gemma4_compat._doctor.reproductions import text as _text
from gemma4_compat._engine import versions as _versions
from gemma4_compat._engine.io import address
from gemma4_compat._lab.workspace import Workspace

IDS = [patch.id for patch in gemma4_compat.patches()]


def report(
    defect: bool, state: str = "applied", parity: float | None = 0.0, detection: str | None = None
) -> dict[str, Any]:
    detail = "the defect" if defect else "as it should be"
    result = {"defect": defect, "detail": detail, "parity": parity, "applicable": True, "seconds": 1.0}
    return result | {"state": state, "reason_code": "error", "reason": "because", "detection": detection}


@pytest.mark.parametrize(
    "without, state, with_shim, verdict",
    [
        (True, "applied", False, Verdict.REPAIRED),
        (False, "not_needed", False, Verdict.NOT_NEEDED),
        (False, "applied", False, Verdict.NOT_NEEDED),
        (True, "applied", True, Verdict.REMAINS),
        (True, "not_needed", True, Verdict.REMAINS),
        (True, "skipped", True, Verdict.OFF_REMAINS),
        (False, "applied", True, Verdict.BROKEN),
        (True, "pending", True, Verdict.REMAINS),
        (True, "unknown", True, Verdict.REMAINS),
        (True, "failed", True, Verdict.FAILED_REMAINS),
        (True, "failed", False, Verdict.FAILED_REMAINS),
        (False, "failed", True, Verdict.BROKEN),
        (False, "failed", False, Verdict.FAILED),
    ],
)
def test_verdict(without: bool, state: str, with_shim: bool, verdict: Verdict) -> None:
    finding = findings.Finding("id", {}, report(without, "skipped"), report(with_shim, state))
    assert finding.verdict == verdict
    assert finding.good is (verdict in {"repaired", "not affected"})
    assert (finding.report is None) is (state != "failed")


@pytest.mark.parametrize("there, verdict", [(True, Verdict.FAILED_REMAINS), (False, Verdict.FAILED_NOT_SEEN)])
def test_a_patch_that_is_off_because_the_code_is_unknown_is_good_where_the_defect_is_not_seen(
    there: bool, verdict: Verdict
) -> None:
    off = report(there, "failed", detection="unknown")
    finding = findings.Finding("fakelib-double", {"fakelib": "9.0"}, report(there, "skipped"), off)
    assert finding.verdict == verdict
    assert finding.good is not there
    assert finding.report
    for part in ("fakelib-double", "fakelib 9.0", "because", "please report it"):
        assert part in finding.report
    assert ("upstream may have fixed it" in finding.report) is not there
    assert finding.as_data()["report"] == finding.report


def test_what_cannot_happen_on_this_stack_is_not_applicable_and_good() -> None:
    nothing = report(False, "applied") | {"applicable": False}
    finding = findings.Finding("id", {}, nothing, nothing)
    assert finding.verdict == "not applicable"
    assert finding.good


class Children:
    """In place of the child processes. ``broken`` are the patches whose defect stays."""

    def __init__(self, broken: frozenset[str]) -> None:
        self.broken = broken
        self.folders: set[Path] = set()

    def __call__(self, command: str, folder: Path, *, disabled: str = "") -> dict[str, Any]:
        shim = not disabled
        assert folder.is_dir()
        self.folders.add(folder.parent)
        if command == "build":
            assert not shim
            return {"built": str(folder)}
        return report(not shim or command in self.broken, "applied" if shim else "skipped")


def doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str, broken: frozenset[str] = frozenset()) -> Any:
    children = Children(broken)
    monkeypatch.setattr(findings, "stack", lambda: dict.fromkeys(findings.STACK, "1.0"))
    monkeypatch.setattr(_children, "can_fork", lambda: False)
    monkeypatch.setattr(_children, "alone", children)
    result = CliRunner().invoke(cli.app, ["doctor", *arguments])
    (folder,) = children.folders
    return result, folder


def test_all_repaired_exits_0_with_a_screen_that_begins_and_ends_with_the_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, folder = doctor(monkeypatch)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("gemma4_compat ")
    assert lines[2] == lines[-1] == f"{len(IDS)} repaired: this stack is fine."
    head, ruler, *rows = lines[4 : lines.index("", 4)]
    assert (head.split(), set(ruler)) == (["area", "repaired"], {"-", " "})
    counts = {area: int(number) for area, number in map(str.split, rows)}
    assert counts == Counter(patch.area for patch in gemma4_compat.patches())
    assert not any(patch_id in result.stdout for patch_id in IDS if patch_id not in lines[-3])
    assert "It took " in lines[-3]
    assert not folder.exists()


def test_one_defect_that_remains_exits_1_and_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = doctor(monkeypatch, broken=frozenset(IDS[1:2]))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    summary = f"{len(IDS) - 1} repaired, 1 defect remains: this stack is not fine, because of {IDS[1]}."
    assert lines[2] == lines[-1] == summary
    assert lines[4].startswith(f"{IDS[1]} (")
    assert lines[7] == "  verdict          defect remains"
    (area,) = [line.split() for line in lines if line.startswith(f"{gemma4_compat.patches()[1].area} ")]
    assert area[2] == "1"
    assert re.search(rf"^\[\d+/{len(IDS)}\] {IDS[1]}: defect remains$", result.stderr, re.MULTILINE), "as it came"


def test_it_says_what_it_does_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = doctor(monkeypatch)
    first, *tenths = result.stderr.splitlines()
    assert first.startswith(f"reproducing {len(IDS)} defects, without and with the fix; ")
    done = [int(re.fullmatch(rf"\[(\d+)/{len(IDS)}\] after \d+ s", line)[1]) for line in tenths]  # type: ignore[index]
    assert len(done) == 10
    assert done == sorted(done)
    assert done[-1] == len(IDS)


def test_verbose_shows_each_as_it_comes_and_a_table_in_the_order_of_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, _ = doctor(monkeypatch, "--verbose")
    assert len(re.findall(r"^\[\d+/\d+\] \S+ \(", result.stdout, re.MULTILINE)) == len(IDS)
    *table, empty, summary = result.stdout.splitlines()[-len(IDS) - 2 :]
    assert (empty, summary) == ("", f"{len(IDS)} repaired: this stack is fine.")
    assert [line.split()[0] for line in table] == IDS
    assert all("bit-exact" in line and line.endswith("repaired") for line in table)


def test_verbose_says_what_a_patch_leaves_on_models(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "leaves   method _apply on a dispatched model: It brings offloaded weights along"
    names = ["accelerate-move-offloaded", "peft-adapter-load"]
    result, _ = doctor(monkeypatch, "--verbose", *names)
    assert result.stdout.count("leaves ") == 1
    assert said in " ".join(result.stdout.split()).replace("leaves ", "leaves   ")
    assert "leaves " not in doctor(monkeypatch, *names)[0].stdout


def test_named_patches_are_shown_and_counted_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = doctor(monkeypatch, *IDS[:3])
    assert result.stdout.startswith("gemma4_compat ")
    assert re.findall(r"^\[(\d)/3\] \S+ \(", result.stdout, re.MULTILINE) == ["1", "2", "3"]


def test_an_error_without_a_message_is_said_to_have_none() -> None:
    finding = findings.Finding("id", {}, report(True) | {"detail": "AssertionError: "}, report(False))
    assert "AssertionError (without a message)\n" in _text.finding_text(finding)
    for text in ("", "ValueError: of what", "as it should be", "these are left:"):
        assert _text._spoken(text) == text


def test_quiet_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = doctor(monkeypatch, "--quiet", broken=frozenset(IDS[:1]))
    assert (result.exit_code, result.stderr) == (1, "")
    assert (
        result.stdout == f"{len(IDS) - 1} repaired, 1 defect remains: this stack is not fine, because of {IDS[0]}.\n"
    )


def test_failed_only_shows_nothing_that_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = doctor(monkeypatch, "--failed-only", broken=frozenset(IDS[:1]))
    assert not any(patch_id in result.stdout for patch_id in IDS[1:])
    assert len(re.findall(rf"^{IDS[0]} .*defect remains$", result.stdout, re.MULTILINE)) == 1
    result, _ = doctor(monkeypatch, "--failed-only")
    assert len(result.stdout.splitlines()) == 2, "the heading and the summary"


def test_markdown_is_a_table_that_shows_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = doctor(monkeypatch, "--format", "markdown", *IDS[:2], broken=frozenset(IDS[:1]))
    title, _, head, _, *table = result.stdout.splitlines()
    assert title.startswith("### 1 repaired, 1 defect remains: ")
    assert head.startswith("gemma4\\_compat ")
    assert table == [
        "| patch | verdict | parity | without the shim | with it |",
        "|---|---|---|---|---|",
        f"| `{IDS[0]}` | **defect remains** | bit-exact | the defect | the defect |",
        f"| `{IDS[1]}` | repaired | bit-exact | the defect | as it should be |",
    ]
    assert "[2/2]" in result.stderr, "progress goes to stderr"
    assert _text._cell("a|b\n*c* `d` <e>") == "a\\|b\\\\n\\*c\\* \\`d\\` \\<e\\>"


def test_github_gets_an_error_for_each_finding_that_is_not_good(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = doctor(monkeypatch, "--format", "github", *IDS[:2], broken=frozenset(IDS[:1]))
    error, notice = result.stdout.splitlines()
    assert error == f"::error title={IDS[0]}::defect remains: the defect"
    assert notice.startswith("::notice title=gemma4-compat doctor::1 repaired, 1 defect remains: ")
    assert _text._data("50%\n::error::\r") == "50%25%0A::error::\\r"


def test_an_unknown_format_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--format", "xml"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "gemma4-compat: --format 'xml' is unknown; use one of text, markdown, github, json\n"


def test_a_table_of_every_verdict_fits_80_columns() -> None:
    patch_id = max(IDS, key=len)
    for verdict in Verdict:
        assert len(f"{patch_id}  bit-exact  {verdict.word}") <= 80, verdict


@pytest.mark.parametrize("broken", [[], IDS[:1]])
def test_json_is_all_there_is_on_stdout(monkeypatch: pytest.MonkeyPatch, broken: list[str]) -> None:
    result, _ = doctor(monkeypatch, "--json", broken=frozenset(broken))
    data = json.loads(result.stdout)
    assert [finding["id"] for finding in data["findings"]] == IDS
    assert data["ok"] is not bool(broken)
    assert result.exit_code == len(broken)
    assert all(finding["with"]["defect"] is (finding["id"] in broken) for finding in data["findings"])
    assert f"[{len(IDS)}/{len(IDS)}]" in result.stderr, "progress goes to stderr"


def test_only_the_patches_asked_for_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = doctor(monkeypatch, IDS[2], IDS[0], "--json")
    assert [finding["id"] for finding in json.loads(result.stdout)["findings"]] == [IDS[0], IDS[2]]


@pytest.mark.parametrize("there, code", [(True, 1), (False, 0)])
def test_a_patch_that_is_off_is_told_where_to_report_it(
    monkeypatch: pytest.MonkeyPatch, there: bool, code: int
) -> None:
    monkeypatch.setattr(findings, "stack", lambda: dict.fromkeys(findings.STACK, "1.0"))
    off = report(there, "failed", detection="unknown")
    monkeypatch.setattr(_children, "can_fork", lambda: False)
    monkeypatch.setattr(_children, "alone", lambda name, folder, **_: {"built": ""} if name == "build" else off)
    result = CliRunner().invoke(cli.app, ["doctor", IDS[0]])
    assert result.exit_code == code, result.output
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("  report")]
    assert f"please {address.report_request()}" in line
    assert f"Say: {IDS[0]}: because [" in line
    word = "failed, defect remains" if there else "failed, defect not seen"
    assert result.stdout.splitlines()[-3].endswith(word)
    assert result.stdout.splitlines()[-1].startswith(f"1 {word}: this stack is {'not ' if there else ''}fine")


@pytest.mark.parametrize("arguments", [[], ["--json"], IDS[:1]])
def test_below_the_oldest_supported_releases_nothing_is_built(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    versions = {"torch": "2.9", "transformers": "5.4.0", "accelerate": "1.12.0", "peft": "0.17.1"}
    monkeypatch.setattr(_versions, "installed", lambda name: versions.get(name, "0.49.0"))
    monkeypatch.setattr(_children, "alone", lambda *_, **__: pytest.fail("a child was started"))
    result = CliRunner().invoke(cli.app, ["doctor", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "gemma4-compat: transformers 5.4.0 is older than the oldest supported release 5.5.0; "
        "upgrade: pip install 'transformers>=5.5.0'; "
        "peft 0.17.1 is older than the oldest supported release 0.18.0; upgrade: pip install 'peft>=0.18.0'\n"
    )


def test_keep_leaves_the_folder_and_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    result, folder = doctor(monkeypatch, "--keep", IDS[0])
    assert folder.is_dir()
    assert f"kept: {folder}" in result.stderr
    shutil.rmtree(folder)


def test_a_checkpoint_that_cannot_be_built_is_bad_usage_not_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "stack", dict)
    monkeypatch.setattr(_children, "can_fork", lambda: False)
    monkeypatch.setattr(_children, "alone", lambda *_, **__: report(True))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 2
    assert "the tiny Gemma 4 checkpoint cannot be built: the defect" in result.stderr


def test_a_child_that_dies_is_a_defect_that_shows_its_last_words(tmp_path: Path) -> None:
    result = _children.alone("no-such-patch", tmp_path, disabled="all")
    assert result["defect"]
    assert result["state"] == "unknown"
    assert result["detail"].startswith("the process ended with 1: ")
    assert "no-such-patch" in result["detail"]


def test_a_child_that_hangs_is_a_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_children, "TIMEOUT", 0)
    result = _children.alone("build", tmp_path, disabled="all")
    assert (result["defect"], result["detail"]) == (True, "no result after 0 s")


class Sides:
    """In place of both kinds of child processes: each reproduction says which side built what it found, and adds its
    own side to what the base checkpoint holds.
    """

    def __init__(self, folder: Path | None = None, disabled: str = "") -> None:
        self._folder, self._disabled = folder, disabled

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, command: str, folder: Path | None = None, *, disabled: str = "") -> dict[str, Any]:
        folder, side = folder or self._folder, disabled or self._disabled or "on"
        assert folder is not None
        workspace = Workspace(folder)
        base = workspace.checkpoint / "weights"
        if command == "build":
            assert side == "all"
            for built in (workspace.checkpoint, workspace.adapter("all")):
                built.mkdir()
            base.write_text("seed")
            config = json.dumps({"base": str(workspace.checkpoint)})
            (workspace.adapter("all") / "adapter_config.json").write_text(config)
            return {"built": str(folder), "forks": True}

        def noted(folder: Path) -> None:
            (folder / "side").write_text(side)

        found = (workspace.cached(noted) / "side").read_text()
        named = json.loads((workspace.adapter("all") / "adapter_config.json").read_text())["base"]
        assert named == str(workspace.checkpoint)
        base.write_text(f"{base.read_text()}, {side}")
        return report(False) | {"detail": f"{found}: {base.read_text()}"}


@pytest.mark.parametrize("forks", [True, False])
def test_a_side_finds_nothing_that_the_other_side_made(monkeypatch: pytest.MonkeyPatch, forks: bool) -> None:
    monkeypatch.setattr(_children, "can_fork", lambda: forks)
    monkeypatch.setattr(_children, "alone", Sides())
    monkeypatch.setattr(_children, "Forks", Sides)
    monkeypatch.setattr(findings, "ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1))  # in order
    patches = _shim.engine.patches()[:2]
    found = {finding.id: finding for finding in findings.examine(patches, keep=False, note=lambda _: None)}
    for patch, times in zip(patches, (1, 2)):
        assert found[patch.id].without["detail"] == "all: seed" + ", all" * times
        assert found[patch.id].with_shim["detail"] == "on: seed" + ", on" * times


def test_reproductions_that_begin_first_are_of_patches() -> None:
    assert {patch.id for patch in gemma4_compat.patches()} >= findings.LONG
