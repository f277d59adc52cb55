"""The command line, in this process: its exit status, what it prints, and that its JSON is JSON."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from gemma4_compat._errors import Gemma4CompatError
from tests.generated.fuzz import adapters, checkpoints, errors, options, requirements, values
from tests.generated.fuzz.case import Case
from tests.generated.fuzz.guard import ViolationError

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_LONGEST_OUTPUT = 2_000_000


def valid_json(data: Any) -> None:
    """Raise :class:`ViolationError` unless ``data`` is an object that any reader of JSON reads."""
    try:
        text = json.dumps(data, allow_nan=False)
        text.encode("ascii")
        if not isinstance(json.loads(text), dict):
            raise ViolationError("the JSON is no object")
    except (ValueError, TypeError, RecursionError) as error:
        raise ViolationError(f"what is printed as JSON is not JSON: {type(error).__name__}\n{error}") from error


def call(case: Case, folder: Path, out: Path) -> Any:
    """Run the command; ``ViolationError`` for what it must not print, ``Gemma4CompatError`` for exit status 2."""
    from typer.testing import CliRunner

    from gemma4_compat import cli
    from gemma4_compat._doctor.reproductions import findings

    arguments = [_filled(text, folder, out) for text in case.options["arguments"]]
    examine = findings.examine
    findings.examine = lambda patches, **_: (item for item in ())  # type: ignore[assignment] # children: seconds for each patch
    try:
        result = CliRunner().invoke(cli.app, arguments)
    finally:
        findings.examine = examine
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    _check(arguments, result.exit_code, result.stdout, result.stderr)
    if result.exit_code == 2:
        raise Gemma4CompatError("exit status 2")
    return None


def _check(arguments: list[str], status: int, printed: str, said: str) -> None:
    command = arguments[0] if arguments and arguments[0].isalpha() else "no command"
    if status not in (0, 1, 2):
        raise ViolationError(f"{command}: exit status {status}")
    for stream, text in (("standard output", printed), ("standard error", said)):
        if found := _CONTROL.search(text):
            around = text[max(0, found.start() - 60) : found.end() + 20]
            raise ViolationError(f"{command}: a raw control character on {stream}\n{found[0]!r} in {around!r}")
        if len(text) > _LONGEST_OUTPUT:
            raise ViolationError(f"{command}: {stream} is too long\n{len(text)} characters")
    if "Traceback (most recent call last)" in said:
        raise ViolationError(f"{command}: a traceback on standard error\n{said[-2000:]}")
    if status == 2 and printed and not re.search(r"^\s*Usage: ", printed):
        raise ViolationError(f"{command}: exit status 2, and standard output is not empty\n{printed[:500]}")
    if status == 2 and not (said + printed).strip():
        raise ViolationError(f"{command}: exit status 2 without a word")
    if "--json" in arguments and status != 2 and "--help" not in arguments and "-h" not in arguments:
        try:
            data = json.loads(printed, parse_constant=_refuse)
        except ValueError as error:
            raise ViolationError(f"{command}: --json does not print JSON\n{error}: {printed[:300]!r}") from error
        if not isinstance(data, dict):
            raise ViolationError(f"{command}: --json prints no object")


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _filled(text: str, folder: Path, out: Path) -> str:
    filled = text.replace("<IN>", str(folder)).replace("<OUT>", str(out))
    # A process gets no zeros in its arguments, and what is no text in the way of Python's file names.
    return (
        os.fsdecode(os.fsencode(filled.encode("utf-8", "surrogateescape").replace(b"\0", b"")))
        if _sane(filled)
        else ""
    )


def _sane(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


_word = (
    values.text | values.number.map(str) | st.sampled_from(["-", "--", "---", "-x", "--json=1", "--no-such", "@file"])
)
_json = st.sampled_from([[], ["--json"]])
_extra = st.lists(_word, max_size=2) | st.just([]) | st.just([])


def _case(files: dict[str, Any], arguments: list[str], flags: list[str], extra: list[str]) -> Case:
    return Case(files, {"arguments": [*arguments, *flags, *extra]})


def _needed(name: str, files: st.SearchStrategy[Any]) -> st.SearchStrategy[Case]:
    flags = st.sampled_from([[], ["--json"], ["--fail-if-droppable"]])
    return st.builds(_case, files, st.just(["needed", f"<IN>/{name}"]), flags, st.just([]))


_PLAIN = ("explain", "list", "status", "doctor", "needed", "scan", "merge", "plan", "export", "--version", "")
_ids = st.sampled_from(["offload", "accelerate-paged-layers", "accelerate-paged-layer", "peft"]) | values.text
#: Commands that import nothing upstream.
light = st.one_of(
    _needed("requirements.txt", requirements.requirements),
    _needed("pyproject.toml", requirements.pyproject),
    _needed("pylock.toml", requirements.pylock),
    _needed("uv.lock", requirements.uv_lock),
    st.builds(_case, adapters.folders, st.just(["scan", "<IN>"]), _json, st.just([])),
    st.builds(
        _case,
        st.just({}),
        st.builds(lambda command, word: [command, word], st.sampled_from(_PLAIN[:6]), _word),
        _json,
        _extra,
    ),
    st.builds(_case, st.just({}), st.builds(lambda name: ["explain", name], _ids | errors.text), _json, st.just([])),
    st.builds(
        _case, st.just({}), st.builds(lambda names: ["doctor", *names], st.lists(_ids, max_size=2)), _json, _extra
    ),
    st.builds(_case, st.just({}), st.lists(st.sampled_from(_PLAIN) | _word, max_size=3), _json, _extra),
)


def _text(value: Any) -> str:
    return hex(value) if isinstance(value, int) and value.bit_length() > 10_000 else str(value)


def _given(option: str, found: st.SearchStrategy[Any]) -> st.SearchStrategy[list[str]]:
    return st.just([]) | st.just([]) | found.map(lambda value: [option, _text(value)])


def _together(*parts: list[str]) -> list[str]:
    return [word for part in parts for word in part]


_number = st.sampled_from(["1", "64"]) | _word
_plan_options = st.builds(
    _together,
    st.sampled_from(["8GiB", "24GiB"]).map(lambda size: ["--vram", size])
    | options.size.map(lambda size: ["--vram", _text(size)]),
    _given("--context", _number),
    _given("--batch", _number),
    _given("--prompt", _number),
    _given("--quantize", st.sampled_from(["4bit", "none"]) | _word),
    _given("--cpu", options.size),
    _given("--adapter", st.sampled_from(["<IN>/adapter", "<IN>"]) | _word),
)
_merge_options = st.builds(
    _together,
    st.sampled_from(["0", "0", "0", "-1", "x", "0.5"]).map(lambda count: ["--check", count]),
    _given("--start", st.sampled_from(["original", "dequantized"]) | _word),
    _given("--dtype", st.sampled_from(["bf16", "fp32"]) | _word),
    _given(
        "--device-map",
        st.sampled_from(["mars:9", '{"": "cpu"}', '{"": 1e999}', "{" * 100_000, '{"a":' * 5000]) | _word,
    ),
    _given("--max-shard-size", options.size),
    _given("--tolerance", _word),
    _given("--skip-module", _word),
    _given("--quantize-result", st.sampled_from(["4bit", "8bit"]) | _word),
    _given("--adapter", st.sampled_from(["<IN>/adapter=1", "<IN>=0.5", "x=nan"]) | _word),
    _given("--weight", st.sampled_from(["0.5", "nan", "-1"])),
    st.sampled_from([[], ["--allow-pickle"]]),
)
_OUT = st.sampled_from(
    ["<OUT>/merged", "<OUT>/merged", "<IN>/base/merged", "<IN>", "<OUT>/" + "x" * 300, "/proc/merged"]
)


_OUT_OF_EXPORT = st.sampled_from(["<OUT>/out", "<OUT>/out", "<IN>/adapter/out", "<IN>", "<OUT>/" + "x" * 300])
_READERS = st.sampled_from(["vllm", "sglang", "mlx", "gguf", "peft"]) | _word
_export_options = st.builds(
    _together,
    _READERS.map(lambda reader: ["--for", reader]),
    st.sampled_from([["--base", "<IN>/base"], ["--base", "<IN>/base"], ["--base", "<IN>/adapter"], []]),
)


def _command(case: Case, arguments: list[str], flags: list[str]) -> Case:
    return Case(case.files, {"arguments": [*arguments, *flags]})


#: Commands that import the libraries.
heavy = st.deferred(
    lambda: st.one_of(
        st.builds(_command, checkpoints.scanned, st.just(["scan", "<IN>/adapter", "<IN>/base"]), _json),
        st.builds(_command, checkpoints.planned, st.just(["plan", "<IN>/base", "--vram", "8GiB"]), _json),
        st.builds(
            _command, checkpoints.planned, _plan_options.map(lambda given: ["plan", "<IN>/base", *given]), _json
        ),
        st.builds(
            _command,
            checkpoints.merged,
            st.builds(lambda out, given: ["merge", "<IN>/base", "<IN>/adapter", out, *given], _OUT, _merge_options),
            _json,
        ),
        st.builds(
            _command,
            checkpoints.merged,
            st.builds(lambda out, given: ["export", "<IN>/adapter", out, *given], _OUT_OF_EXPORT, _export_options),
            _json,
        ),
    )
)
