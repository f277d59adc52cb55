"""The readers and commands that are tried: which inputs they get, how they are called, what they may cost."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import gemma4_compat
from gemma4_compat._adapter_tools.scan import job
from gemma4_compat._adapter_tools.scan.text import scan_text
from gemma4_compat._doctor.explain import answers, explanation, search
from gemma4_compat._engine.io import terminal
from gemma4_compat._engine.io.text import parse_size
from gemma4_compat._gemma4.checkpoint import header, shards
from gemma4_compat._needed import judge, report
from gemma4_compat._plan import budgets
from tests.generated.fuzz import adapters, checkpoints, commands, errors, options, requirements, safetensors
from tests.generated.fuzz.case import Case
from tests.generated.fuzz.guard import Bound, ViolationError

#: Judging does not depend on the format: a few patches that ask about every library are enough.
_PATCHES = tuple({(patch.distribution, patch.requires): patch for patch in gemma4_compat.patches()}.values())[:8]
_ALL = gemma4_compat.patches()
_STATUSES = gemma4_compat.status()


@dataclass(frozen=True)
class Reader:
    """Something that reads what users give it.

    Attributes:
        name: for ``--reader``.
        about: what it is, for docs/FUZZING.md.
        cases: its inputs.
        call: ``call(input, its folder, a folder for outputs)``; returns an answer or raises what is judged.
        bound: what an input may cost.
        upstream: whether it may import torch, transformers and PEFT (an unknown ``peft_type`` is looked up there);
            they are imported before the first input.
        batch: how many inputs are run, and counted, at a time.
    """

    name: str
    about: str
    cases: st.SearchStrategy[Case]
    call: Callable[[Case, Path, Path], Any]
    bound: Bound
    upstream: bool = False
    batch: int = 500


def _files(files: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    return st.builds(Case, files)


def _safetensors(_case: Case, folder: Path, _out: Path) -> Any:
    return header.header(folder / "model.safetensors")


def _index(_case: Case, folder: Path, _out: Path) -> Any:
    found = shards.checkpoint(folder / "base")
    # By its name: the cache of the hub consists of links, which lead where they lead.
    outside = [entry.file for entry in found.values() if ".." in entry.file.parts or folder not in entry.file.parents]
    if outside:
        raise ViolationError(f"a shard outside the folder was read\n{outside[0]}")
    return found


def _adapter(_case: Case, folder: Path, _out: Path) -> Any:
    found = job.scan_adapter(folder)
    commands.valid_json(found.as_data())
    return scan_text(found, width=100)


def _needed(name: str) -> Callable[[Case, Path, Path], Any]:
    def read(_case: Case, folder: Path, _out: Path) -> Any:
        found = judge.assess(folder / name, _PATCHES)
        commands.valid_json(report.assessment_data(found))
        return report.assessment_text(found)

    return read


def _sizes(case: Case, _folder: Path, _out: Path) -> Any:
    parse_size(case.options["size"])
    return budgets.given(case.options["vram"])


def _error(case: Case, _folder: Path, _out: Path) -> Any:
    said = explanation.read(case.options["text"])
    answer = answers.sorted_answer(search.answer(said, _ALL), said, _STATUSES)
    commands.valid_json(json.loads(terminal.json_text(answers.answer_data(said, answer))))
    text = answers.answer_text(said, answer, _STATUSES, 80)
    if not text.replace("\n", "").isprintable():
        raise ViolationError(f"a raw control character\n{text!r}")
    return text


_SMALL = Bound(seconds=1.0, seconds_per_mib=2.0, mib=48, mib_per_mib=40)
#: A requirements file has a line for every few bytes of it, and each is a requirement of its own: a MiB of "./a" takes
#: 3.6 s, of "a==1" 0.4 s, and three times as long on a slow machine.
_LINES = Bound(seconds=1.0, seconds_per_mib=12.0, mib=48, mib_per_mib=40)
_UPSTREAM = Bound(seconds=15.0, seconds_per_mib=5.0, mib=400, mib_per_mib=40)

READERS: tuple[Reader, ...] = (
    Reader(
        "safetensors",
        "the header of a safetensors file",
        _files(st.builds(lambda file: {"model.safetensors": file}, safetensors.files(adapters.HEADERS))),
        _safetensors,
        _SMALL,
    ),
    Reader("index", "a checkpoint in shards, by its index", _files(checkpoints.indexed), _index, _SMALL),
    Reader(
        "adapter",
        "scan_adapter without a base: adapter_config.json and adapter_model.safetensors",
        _files(adapters.folders),
        _adapter,
        _SMALL,
        upstream=True,
    ),
    Reader(
        "requirements",
        "needed, of requirements files",
        _files(requirements.requirements),
        _needed("requirements.txt"),
        _LINES,
    ),
    Reader(
        "pyproject", "needed, of pyproject.toml", _files(requirements.pyproject), _needed("pyproject.toml"), _LINES
    ),
    Reader("pylock", "needed, of pylock.toml", _files(requirements.pylock), _needed("pylock.toml"), _LINES),
    Reader("uv-lock", "needed, of uv.lock", _files(requirements.uv_lock), _needed("uv.lock"), _LINES),
    Reader(
        "sizes",
        "sizes and budgets, as plan and merge take them",
        st.builds(Case, st.just({}), options.sizes),
        _sizes,
        _SMALL,
    ),
    Reader("errors", "explain, of the text of errors and tracebacks", errors.cases, _error, _SMALL),
    Reader(
        "commands",
        "the command line without the libraries: needed, scan, explain, list, status, doctor",
        commands.light,
        commands.call,
        Bound(seconds=2.0, seconds_per_mib=5.0, mib=64, mib_per_mib=60),
        upstream=True,
    ),
    Reader(
        "configuration",
        "a base's config.json, built on the meta device",
        _files(checkpoints.configured),
        checkpoints.build_base,
        _UPSTREAM,
        upstream=True,
        batch=100,
    ),
    Reader(
        "scan-base",
        "scan_adapter with a base: both configurations and the header",
        checkpoints.scanned,
        checkpoints.scan,
        _UPSTREAM,
        upstream=True,
        batch=100,
    ),
    Reader(
        "plan",
        "plan_device_map: config.json, an adapter, and every option",
        checkpoints.planned,
        checkpoints.plan,
        _UPSTREAM,
        upstream=True,
        batch=100,
    ),
    Reader(
        "merge",
        "merge_adapter: base, adapter, and every option; without the check of outputs",
        checkpoints.merged,
        checkpoints.merge,
        _UPSTREAM,
        upstream=True,
        batch=100,
    ),
    Reader(
        "commands-upstream",
        "the command line with the libraries: plan, scan with a base, merge",
        commands.heavy,
        commands.call,
        _UPSTREAM,
        upstream=True,
        batch=100,
    ),
)


def find(name: str) -> Reader:
    """The reader of that name."""
    return next(reader for reader in READERS if reader.name == name)
