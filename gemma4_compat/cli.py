"""The command line: ``gemma4-compat doctor | status | list | explain | needed | plan | scan | merge``."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
import typer.core

import gemma4_compat
from gemma4_compat._doctor import findings as _doctor
from gemma4_compat._engine import report as _report
from gemma4_compat._engine import settings, terminal
from gemma4_compat._engine.text import table_text
from gemma4_compat._errors import printable
from gemma4_compat._needed import files, judge
from gemma4_compat._needed import report as _needed_report

_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, which newer releases of typer bring themselves


class _Commands(typer.core.TyperGroup):
    """The commands; what a usage error says of arguments is shown like all other text."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.message = printable(error.message)
            raise


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Repairs for Gemma 4 with transformers, accelerate, PEFT and bitsandbytes: what they are, whether this "
    "environment needs them, and whether they work here.",
)

_P = ParamSpec("_P")
_SIGPIPE = 128 + 13

_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

# Options of `merge`.
_Start = Annotated[
    str,
    typer.Option(
        "--base",
        metavar="original|dequantized",
        help="The weights to merge into. original: as they are on disk; right when the merged model is used in bf16, "
        "or is quantized again by another tool. dequantized: each weight that bitsandbytes would quantize goes to "
        "4 bits and back first; right when the adapter was trained and evaluated on the quantized base and the merged "
        "model must give the same outputs. The first has better weights that the adapter never saw; the second keeps "
        "the quantization errors that the adapter learned to compensate.",
    ),
]
_QuantizeBase = Annotated[
    str | None,
    typer.Option(
        "--quantize", help="For dequantized: 4bit, 4bit-double or 8bit; default: what the base says, or 4bit-double."
    ),
]
_SkipModules = Annotated[
    list[str] | None,
    typer.Option("--skip-module", help="For dequantized: an entry of llm_int8_skip_modules; may be repeated."),
]
_CheckDevice = Annotated[
    str | None,
    typer.Option("--device-map", help="Where the check runs: auto, cpu, cuda:0 or JSON; default: a GPU, or the CPU."),
]
_Tolerance = Annotated[
    float | None,
    typer.Option("--tolerance", help="Largest difference of logits; default: a bound measured on this model."),
]


def main() -> None:
    """Entry point of the ``gemma4-compat`` command. Exit codes: 0 good, 1 a defect remains, 2 bad usage.

    141 where the reader of a pipe has gone, as for a program that SIGPIPE ends.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an encoding that lacks a character is no error
    try:
        app()
    except OSError as error:
        terminal.discard()
        _tell(f"{error.filename or 'standard output'} cannot be used: {error.strerror or error}")
        raise SystemExit(2) from None


def _command(needs: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Makes what a function raises one line on standard error; ``needs`` is why it imports libraries."""

    def decorate(function: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(function)
        def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
            with terminal.guarded():
                try:
                    function(*args, **kwargs)
                except gemma4_compat.Gemma4CompatError as error:
                    _fail(str(error))
                except ModuleNotFoundError as error:
                    _fail(f"{error.name} is not installed; {needs} needs it: pip install 'gemma4-compat[stack]'")

        return guarded

    return decorate


@app.command()
@_command("a reproduction")
def doctor(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Patches to examine; default: all.")
    ] = None,
    as_json: _Json = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary folder and say where it is.")] = False,
) -> None:
    """Reproduce each defect on a tiny Gemma 4, without and with the shim, in processes of their own.

    Exit 0 when everything this stack needs is repaired, 1 when a defect remains or a patch failed, 2 on bad usage or
    with a library older than the oldest supported release.
    """
    patches = _chosen(ids or [])
    versions = _doctor.stack()
    _say(_heading(versions), as_json)
    findings = []
    # Closed at once when nobody reads what is said: the children and their folder do not outlive this.
    with contextlib.closing(_doctor.examine(patches, keep=keep, note=_tell)) as found:
        for finding in found:
            findings.append(finding)
            _say("\n" + _finding_text(finding), as_json)
    order = {patch.id: index for index, patch in enumerate(patches)}
    findings.sort(key=lambda finding: order[finding.id])
    good = all(finding.good for finding in findings)
    if as_json:
        _print_json(
            {
                "python": platform.python_version(),
                "versions": versions,
                "findings": [finding.as_data() for finding in findings],
                "ok": good,
            }
        )
    else:
        _say("\n" + _table(findings), as_json)
    raise typer.Exit(0 if good else 1)


@app.command()
@_command("this command")
def status(as_json: _Json = False) -> None:
    """What each patch would do in this environment. Imports none of the libraries."""
    statuses = gemma4_compat.status()
    if as_json:
        _print_json({"patches": [_report.status_data(item) for item in statuses.values()]})
    else:
        _say(_report.status_text(statuses))


@app.command(name="list")
@_command("this command")
def list_patches(as_json: _Json = False) -> None:
    """Every patch this package knows, with its area and the releases it is for."""
    if as_json:
        _print_json({"patches": [_report.patch_data(patch) for patch in gemma4_compat.patches()]})
    else:
        _say(_report.patches_text(gemma4_compat.patches()))


@app.command()
@_command("this command")
def explain(
    name: Annotated[
        str, typer.Argument(metavar="ID|AREA", help="A patch, or an area, such as offload; `list` shows both.")
    ],
    as_json: _Json = False,
) -> None:
    """What a patch, or each patch of an area, repairs, why upstream breaks, what it changes, and when it goes."""
    statuses = gemma4_compat.status()
    areas = {patch.id: patch.area for patch in gemma4_compat.patches()}
    patches = [patch for patch in gemma4_compat.patches() if name in (patch.id, areas[patch.id])]
    if not patches:
        close = settings.nearest(name, {*areas, *areas.values()})
        known = f"areas are {', '.join(sorted(set(areas.values())))}, and `gemma4-compat list` shows every id."
        _fail(f"no patch and no area is called {name!r}; " + (f"did you mean {close!r}?" if close else known))
    if as_json:
        explained = [
            _report.patch_data(patch) | {"status": _report.status_data(statuses[patch.id])} for patch in patches
        ]
        _print_json({"patches": explained})
    else:
        _say("\n\n".join(_report.explanation_text(patch, statuses[patch.id]) for patch in patches))


@app.command()
@_command("this command")
def needed(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help=f"{files.ACCEPTED}; default: what is installed.")
    ] = None,
    as_json: _Json = False,
    fail_if_droppable: Annotated[
        bool, typer.Option("--fail-if-droppable", help="Exit 1 when no patch is needed any more, for CI to tell you.")
    ] = False,
) -> None:
    """Which patches a stack still needs, and which releases make each unnecessary. Imports none of the libraries.

    Exit 0 when the question was answered, 2 when FILE cannot be understood.
    """
    assessment = judge.assess(file, gemma4_compat.patches())
    if as_json:
        _print_json(_needed_report.assessment_data(assessment))
    else:
        _say(_needed_report.assessment_text(assessment))
    raise typer.Exit(1 if fail_if_droppable and assessment.droppable else 0)


@app.command()
@_command("a plan")
def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="E2B, E4B, 12B, 26B-A4B, 31B, a checkpoint's folder, or a cached id."),
    ],
    vram: Annotated[
        list[str], typer.Option("--vram", help="What PyTorch may allocate, such as 8GiB; once for each accelerator.")
    ],
    context: Annotated[int, typer.Option("--context", help="Tokens of a sequence, prompt and answer.")] = 8192,
    batch: Annotated[int, typer.Option("--batch", help="Sequences at a time.")] = 1,
    prompt: Annotated[int | None, typer.Option("--prompt", help="Tokens of the prompt; default: the context.")] = None,
    quantize: Annotated[str, typer.Option("--quantize", help="4bit, 4bit-double, 8bit or none.")] = "4bit",
    quantize_experts: Annotated[
        bool, typer.Option("--quantize-experts", help="Experts to 4 bits, too; otherwise they stay in bf16.")
    ] = False,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="Folder of a PEFT adapter to be loaded.")] = None,
    vision: Annotated[bool, typer.Option("--vision", help="Inputs contain images.")] = False,
    audio: Annotated[bool, typer.Option("--audio", help="Inputs contain audio.")] = False,
    cpu: Annotated[str | None, typer.Option("--cpu", help="Host memory for what is offloaded.")] = None,
    disk: Annotated[str | None, typer.Option("--disk", help="Disk space for what is offloaded.")] = None,
    fast: Annotated[
        bool, typer.Option("--fast/--no-fast", help="Room for gemma4_compat.decode_fast, and the call in the code.")
    ] = True,
    as_json: _Json = False,
) -> None:
    """Which part of a model goes where in the memory there is, what that will use, and the code that loads it.

    Needs torch and transformers, no weights and no GPU. Exit 0 with a plan, 2 when nothing fits or on bad usage.
    """
    from gemma4_compat._planner import text as _plan_text

    planned = gemma4_compat.plan_device_map(
        model,
        vram,
        context=context,
        batch=batch,
        prompt=prompt,
        quantize=quantize,
        quantize_experts=quantize_experts,
        adapter=adapter,
        vision=vision,
        audio=audio,
        cpu=cpu,
        disk=disk,
        fast=fast,
    )
    if as_json:
        _print_json(planned.as_data())
    else:
        _say(_plan_text.plan_text(planned, blocks=_plan_text.can_show_blocks(getattr(sys.stdout, "encoding", None))))


@app.command()
@_command("a scan with BASE")
def scan(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="A saved adapter's folder, or a cached id.")],
    base: Annotated[
        str | None,
        typer.Argument(
            metavar="[BASE]", help="E2B, E4B, 12B, 26B-A4B, 31B, a checkpoint's folder, or a cached id; default: none."
        ),
    ] = None,
    quantize: Annotated[
        str, typer.Option("--quantize", help="How BASE will be quantized: 4bit, 4bit-double, 8bit or none.")
    ] = "none",
    as_json: _Json = False,
) -> None:
    """What a saved adapter is, and what it would do on BASE: problems first.

    Reads headers and configurations, no weights and no pickle. Needs torch, transformers and PEFT only with BASE.
    Exit 0 without problems, 1 with some, 2 when ADAPTER or BASE cannot be read.
    """
    from gemma4_compat._scan import text as _scan_text

    found = gemma4_compat.scan_adapter(adapter, base, quantize=quantize)
    if as_json:
        _print_json(found.as_data())
    else:
        _say(_scan_text.scan_text(found))
    raise typer.Exit(0 if found.ok else 1)


@app.command()
@_command("a merge")
def merge(
    base_model: Annotated[
        str, typer.Argument(metavar="BASE", help="Folder of the base's checkpoint in safetensors, or a cached id.")
    ],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder of a PEFT adapter, or a cached id.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder of the merged model; must not exist, or be empty.")
    ],
    start: _Start = "original",
    quantize: _QuantizeBase = None,
    skip: _SkipModules = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16, fp16 or fp32; default: the base's.")] = None,
    device_map: _CheckDevice = None,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Of a file with weights.")] = "5GB",
    check: Annotated[int, typer.Option("--check", help="Prompts to compare outputs on; 0: no check.")] = 4,
    tolerance: _Tolerance = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read an adapter_model.bin (tensors and nothing else).")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Merge an adapter into its base with little memory, and compare outputs with those of the adapter.

    Exit 0 when OUT is there and parity is within bounds, 1 when it is not (then there is no OUT), 2 on bad input.
    """
    from gemma4_compat._merge import result
    from gemma4_compat._merge import text as _merge_text

    try:
        report = gemma4_compat.merge_adapter(
            base_model,
            adapter,
            out,
            start=start,
            quantize=quantize,
            skip_modules=skip or None,
            dtype=dtype,
            device_map=_device_map(device_map),
            max_shard_size=max_shard_size,
            check=check,
            tolerance=tolerance,
            allow_pickle=allow_pickle,
        )
    except result.MergeParityError as error:
        _tell(str(error))
        report = error.report
    if as_json:
        _print_json(report.as_data())
    else:
        _say(_merge_text.report_text(report))
    raise typer.Exit(0 if report.parity is None or report.parity.ok else 1)


def _device_map(text: str | None) -> Any:
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        _fail(f"--device-map is neither a name nor JSON: {error}")


@app.callback(invoke_without_command=True)
def _version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        typer.echo(gemma4_compat.__version__)
        raise typer.Exit(0)


def _chosen(ids: list[str]) -> list[gemma4_compat.Patch]:
    known = {patch.id: patch for patch in gemma4_compat.patches()}
    for patch_id in ids:
        if patch_id not in known:
            _fail(settings.unknown_id(patch_id, known))
    return [patch for patch in known.values() if patch.id in ids or not ids]


def _fail(message: str) -> Any:
    _tell(message)
    raise typer.Exit(2)


def _tell(message: str) -> None:
    terminal.write(f"gemma4-compat: {printable(message)}", error=True)


def _say(text: str, as_json: bool = False) -> None:
    try:
        terminal.write(text, error=as_json)  # with --json, standard output holds the JSON and nothing else
    except BrokenPipeError:
        terminal.discard()
        raise typer.Exit(_SIGPIPE) from None


def _print_json(data: Mapping[str, Any]) -> None:
    _say(terminal.json_text({"gemma4_compat": gemma4_compat.__version__, **data}))


def _heading(versions: dict[str, str]) -> str:
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"gemma4_compat {gemma4_compat.__version__} on Python {platform.python_version()}: {listed}"


def _finding_text(finding: _doctor.Finding) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in finding.versions.items())
    return (
        f"{finding.id} ({versions})\n"
        f"  without  {_shorten(printable(finding.without['detail']))}\n"
        f"  with     {_shorten(printable(finding.with_shim['detail']))}\n"
        f"  verdict  {finding.verdict}" + (f"\n  report   {finding.report}" if finding.report else "")
    )


def _table(findings: list[_doctor.Finding]) -> str:
    rows = [("patch", "parity", "verdict")]
    for finding in findings:
        parity = finding.with_shim["parity"]
        shown = "-" if parity is None else "bit-exact" if parity == 0 else f"{parity:.3g}"
        rows.append((finding.id, shown, finding.verdict))
    return table_text(rows, header=True)


def _shorten(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
