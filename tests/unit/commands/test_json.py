"""``--json`` is what docs/JSON.md says: one object, valid for every parser, with these keys and no others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._adapter_tools.merge.check import Parity
from gemma4_compat._adapter_tools.merge.result import MergeParityError, MergeReport
from gemma4_compat._adapter_tools.repair import RepairReport
from gemma4_compat._doctor import environment as facts
from gemma4_compat._doctor.check.run import Check, Outcome
from gemma4_compat._doctor.launch import environment
from gemma4_compat._doctor.reproductions import children, findings
from gemma4_compat._engine.io import terminal
from gemma4_compat._lab import tiny_models
from tests.unit.commands.helpers import ROOT
from tests.unit.doctor.check import samples as check_samples
from tests.unit.gemma4.adapters.adapter_files import lora, write_adapter
from tests.unit.plan.test_arithmetic import a_plan

PATCH = gemma4_compat.patches()[0].id
TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float, str),
    "null": (type(None),),
    "map": (dict,),
}


def documented() -> dict[str, dict[str, str]]:
    """Command -> key -> type, of the page."""
    tables: dict[str, dict[str, str]] = {}
    for section in (ROOT / "docs" / "JSON.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        name = section.partition("\n")[0].strip("`")
        tables[name] = dict(re.findall(r"^\| `([^`]+)` \| ([a-z ]+) \|", section, re.MULTILINE))
    everywhere = tables.pop("every command")
    tables["explain"] |= tables["list"]
    return {name: everywhere | table for name, table in tables.items()}


PAGE = documented()


def values(data: Any, known: dict[str, str], path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value by its key as the page writes it; a list without items has none."""
    if isinstance(data, dict) and known.get(path) != "map":
        for key, value in data.items():
            yield from values(value, known, f"{path}.{key}".removeprefix("."))
    elif isinstance(data, list):
        for value in data:
            yield from values(value, known, f"{path}[]")
    else:
        yield path, data


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def assert_as_documented(command: str, text: str, *, absent: tuple[str, ...] = ()) -> Any:
    data = json.loads(text, parse_constant=refuse)
    assert text.isascii()
    assert (data["schema"], type(data)) == (1, dict)
    known = PAGE[command]
    for path, value in values(data, known):
        assert path in known, f"{path} is not on the page"
        assert isinstance(value, tuple(kind for name in known[path].split(" or ") for kind in TYPES[name])), path
    empty = [path for path in known if path.partition("[]")[0] in absent or path in absent]
    lists = {path for path in known if path.endswith("[]")}
    missing = set(known) - {path for path, _ in values(data, known)} - lists - set(empty)
    assert not missing, "on the page and not in the output"
    return data


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, [*arguments, "--json"])
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_page_has_every_command() -> None:
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}  # type: ignore[union-attr]
    assert {name.partition(" ")[0] for name in PAGE} == commands - {
        "run",
        "reproduce",
        "serve",
        "chat",
    }  # these run a program, or print one


@pytest.mark.parametrize("arguments", [["status"], ["list"], ["explain", PATCH], ["explain", "offload"], ["needed"]])
def test_what_is_known_about_patches(arguments: list[str]) -> None:
    data = assert_as_documented(arguments[0], run(*arguments), absent=("matches",))
    assert data["gemma4_compat"] == gemma4_compat.__version__


@pytest.mark.parametrize("names", [None, ["NVIDIA X"]])
def test_env(monkeypatch: pytest.MonkeyPatch, names: list[str] | None) -> None:
    monkeypatch.setattr(facts, "_devices", lambda: names)
    assert_as_documented("env", run("env"), absent=("devices",))


def test_enable_and_disable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(environment, "_is_read", lambda: True)
    for command, changed in (("enable", True), ("enable", False), ("disable", True), ("disable", False)):
        assert assert_as_documented(command, run(command))["changed"] is changed


def test_needed_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("transformers==5.6.2\npeft\n")
    assert_as_documented("needed", run("needed", str(file)))


def test_scan(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 5, "lora_alpha": math.nan, "target_modules": ["q_proj"]}
    folder = write_adapter(tmp_path, lora("model.layers.0.self_attn.q_proj"), settings)
    data = assert_as_documented("scan", run("scan", str(folder), code=1), absent=("hits",))
    assert data["settings"]["lora_alpha"] == "NaN"


def test_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma4_compat, "plan_device_map", lambda *_, **__: a_plan())
    assert_as_documented("plan", run("plan", "E2B", "--vram", "8GiB"))


def test_plan_of_a_training(tmp_path: Path) -> None:
    tiny_models.build_checkpoint(tmp_path)
    shown = run("plan-training", str(tmp_path), "--vram", "8GiB", "--max-length", "8")
    assert_as_documented("plan-training", shown)


def test_export(tmp_path: Path) -> None:
    prefix, q = "base_model.model.model.layers.0.self_attn", {"q_proj.lora_A": (5, 1536), "q_proj.lora_B": (2048, 5)}
    shapes = {f"{prefix}.{name}.weight": shape for name, shape in q.items()}
    folder = write_adapter(tmp_path / "adapter", shapes, {"peft_type": "LORA", "r": 5, "target_modules": ["q_proj"]})
    for target in ("vllm", "peft"):
        text = run("export", str(folder), str(tmp_path / target), "--for", target, "--base", "E2B")
        data = assert_as_documented("export", text)
        assert data["reader"].lower().startswith(target)


NUMBERS = ("difference", "difference_rms", "noise", "noise_rms", "effect", "effect_rms", "bound", "kl_mean", "kl_max")


def a_report(value: float) -> MergeReport:
    numbers = dict.fromkeys(NUMBERS, value)
    parity = Parity(
        prompts=("a",), reference="b", positions=1, bound_rms=value, greedy_equal=(1,), greedy_tokens=1, **numbers
    )  # type: ignore[arg-type]
    texts = dict.fromkeys(("out", "base", "adapter", "model_class", "start", "dtype", "peft_type"), "x")
    counts = dict.fromkeys(("modules", "replaced", "dequantized", "nbytes"), 1)
    return MergeReport(
        **texts, **counts, quantization=None, assumed=False, dead=("a",), absent=("b",), untied=False, files=("f",),
        seconds={"merge": 1.0, "check": 1.0}, versions={"torch": "2.9"}, parity=parity,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    "value, shown", [(0.5, 0.5), (math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
)
def test_merge(monkeypatch: pytest.MonkeyPatch, value: float, shown: Any) -> None:
    report = a_report(value)

    def merge(*_: Any, **__: Any) -> MergeReport:
        if report.parity is None or report.parity.ok:
            return report
        raise MergeParityError("out of bounds", report)

    monkeypatch.setattr(gemma4_compat, "merge_adapter", merge)
    code = 0 if report.parity is not None and report.parity.ok else 1
    data = assert_as_documented("merge", run("merge", "a", "b", "c", code=code), absent=("parity",))
    assert {data["parity"][name] for name in NUMBERS} == {shown}
    without = terminal.json_text(replace(report, parity=None).as_data())
    assert json.loads(without)["parity"] is None


@pytest.mark.parametrize("all_there", [True, False])
def test_check(monkeypatch: pytest.MonkeyPatch, all_there: bool) -> None:
    found = check_samples.found()
    if all_there:
        crash = check_samples.error(frames=["torch/a.py:1 f"], patches=[{"id": PATCH, "state": "off"}])
        found.placements[0].failed["sound"] = crash
        found.placements[0].skipped.append("speed at 1024 tokens")
        parity = {"ok": True, "difference": math.nan, "bound": 0.5, "kl_max": 0.1, "greedy_tokens": 1}
        found.merge = Outcome("merge", {}, failed={"merge": crash}, said={"merged": parity | {"greedy_equal": [1]}})
    else:
        found.survey["machine"]["gpu"] = found.survey["adapter"] = None
        found.placements[1].order["planned"] = None
    monkeypatch.setattr(Check, "run", lambda self: found)
    done = CliRunner().invoke(cli.app, ["check", "--json", "-"])
    assert done.exit_code == (1 if all_there else 0), done.output
    may_be_null = ("machine.gpu", "adapter", "placements[].planned", "merge", "merge.parity")
    below = [path for path in PAGE["check"] if path.startswith(("machine.gpu.", "adapter.", "merge.", "placements"))]
    assert_as_documented("check", done.stdout, absent=may_be_null if all_there else (*may_be_null, *below))


def test_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    report = RepairReport(
        out="x", checkpoint="x", original="x", tensors=("a",), dtypes=("bfloat16",), files=("f",), nbytes=2,
        settings={"text_config.global_head_dim": 512, "text_config.num_global_key_value_heads": None},
        added_nbytes=1, seconds=0.5,
    )  # fmt: skip
    monkeypatch.setattr(gemma4_compat, "repair_checkpoint", lambda *_, **__: report)
    assert_as_documented("repair", run("repair", "a", "c", "--from", "b"))


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"defect": False, "detail": "", "parity": math.nan, "applicable": True, "seconds": 1.0}
    result |= {"state": "applied", "reason": "", "detection": None}
    monkeypatch.setattr(findings, "stack", lambda: dict.fromkeys(findings.STACK, "1.0"))
    monkeypatch.setattr(children, "can_fork", lambda: False)
    monkeypatch.setattr(children, "alone", lambda name, *_, **__: {"built": ""} if name == "build" else result)
    data = assert_as_documented("doctor", run("doctor", PATCH))
    assert data["findings"][0]["with"]["parity"] == "NaN"
