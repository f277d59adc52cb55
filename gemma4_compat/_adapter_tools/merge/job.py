"""Merge an adapter into its base layer by layer, and compare outputs before the merged model gets its name.

Memory: the tensors of the adapter, and three float32 copies of the current module's weights (the base's, the adapter's
difference, their sum). Tensors without an adapter are copied in pieces of 64 MiB. Neither the whole model nor a shard
is ever in memory. The check afterwards loads two models, one after the other.

Everything is written into a folder beside the final one, which is renamed when parity is within bounds.
"""

from __future__ import annotations

import math
import reprlib
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._adapter_tools.merge import adapter as adapters
from gemma4_compat._adapter_tools.merge import quantized, resume, text, verification, weights
from gemma4_compat._adapter_tools.merge.check import Parity
from gemma4_compat._adapter_tools.merge.result import MergeParityError, MergeReport
from gemma4_compat._adapter_tools.merge.tensors import MergedTensors, tied_sources
from gemma4_compat._engine import versions
from gemma4_compat._engine.io import arguments, shadowed, terminal
from gemma4_compat._engine.io.text import parse_size
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import folders, shards
from gemma4_compat._gemma4.models import build

#: torch's names of dtypes -> those of the reports.
_DTYPES = {name: short for short, name in weights.DTYPES.items()}
#: The folder for the merged model if the result is quantized.
_MERGED = ".merged"
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")


def merge_adapter(
    base: str | Path,
    adapter: str | Path | Mapping[str | Path, float],
    out: str | Path,
    *,
    start: str = "original",
    quantize: Any = None,
    skip_modules: Sequence[str] | None = None,
    dtype: str | None = None,
    quantize_result: str | None = None,
    device_map: Any = None,
    max_shard_size: int | str = "5GB",
    check: int = 4,
    tolerance: float | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
) -> MergeReport:
    """Merge a LoRA, or another adapter that PEFT can merge, into its base, and compare outputs with the adapter's.

    >>> report = gemma4_compat.merge_adapter("gemma-4-E4B-it", "my-adapter", "merged")
    >>> report.parity.ok
    True

    PEFT's own code merges one module at a time in float32 and rounds once. Host memory holds the adapter and three
    times the largest adapted module in float32, whatever the size of the model; the check then loads two models, one
    after the other. ``out`` appears once everything is done: the model, every file beside the base's weights,
    ``merge_report.json`` and ``merge_report.txt``. The base and the adapter are only read.

    Args:
        base: the folder of a Gemma 4 checkpoint in safetensors, or the id of a cached one.
        adapter: the folder of an adapter, or the id of a cached one; keys of another Gemma 4 class are understood. Or
            several LoRAs with weights, ``{"one": 1.0, "other": 0.5}``: the changes they make to a weight are
            multiplied and added, as PEFT's ``add_weighted_adapter`` with ``combination_type="cat"`` does.
        out: a folder that does not exist, or is empty.
        start: "original" (the weights as they are on disk) or "dequantized" (what the 4-bit or 8-bit base computes
            with, as the adapter saw it).
        quantize: for "dequantized": "4bit", "4bit-double", "8bit" or a ``BitsAndBytesConfig``; default: what the base
            says, else "4bit-double".
        skip_modules: for "dequantized" and ``quantize_result``: ``llm_int8_skip_modules``; default: those of
            ``quantize`` if it is a configuration, else what a quantized base says, else the head and the routers.
        dtype: "bf16", "fp16" or "fp32", or torch's name of it; default: the base's. A value that the dtype cannot hold
            is an error.
        quantize_result: write the merged model in "4bit", "4bit-double" or "8bit" of bitsandbytes; default: in
            ``dtype``. Its outputs are compared again; the bound is the change that this quantization makes to the
            base. Needs disk space for both.
        device_map: where the check runs; default: the first GPU, else the CPU.
        max_shard_size: of a file with weights.
        check: number of prompts to compare outputs on; 0: no check.
        tolerance: the largest difference of logits; default: a bound measured on this model.
        allow_pickle: read an ``adapter_model.bin`` (tensors and nothing else).
        progress: show a progress bar; default: on a terminal.

    Returns:
        What was merged, and the measured parity: logits, KL divergence, greedy tokens.

    Raises:
        MergeParityError: parity is out of bounds; its ``report`` has the measurements, and nothing is left behind.
        Gemma4CompatError: it cannot be done; the message says why, and nothing is left behind.
    """
    dtype = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    _refuse_bad_options(start, dtype, check, tolerance)
    weights_of = _weights_of(adapter)
    largest = parse_size(max_shard_size)
    if not largest:
        raise Gemma4CompatError("max_shard_size must be more than 0; write it as 5GB")
    shadowed.refuse("torch", "transformers", "peft")
    base_folder = folders.local(base, "base")
    given = [(folders.local(name, "adapter"), weight) for name, weight in weights_of.items()]
    out = folders.output(out, base_folder, *(folder for folder, _ in given))
    model = build.on_meta(str(base_folder))[0]
    placement = verification.placement(model, device_map)
    of_base = None if quantize_result is not None and start == "original" else skip_modules
    chosen = weights.choose(model, start, quantize, of_base)
    target = quantized.target(model, quantize_result, skip_modules, chosen)
    entries = shards.checkpoint(base_folder)
    kind = dtype or weights.stored_dtype(model, entries, chosen)
    left: list[Path] = []
    with (
        folders.staging(out, leftovers=left) as staging,
        tempfile.TemporaryDirectory(dir=staging, prefix=".adapter-") as scratch,
    ):
        began = time.perf_counter()
        found = weights.find_base(entries, model)
        opened = _opened(given, model, Path(scratch), found, allow_pickle)
        weights.apply(chosen, found, model, kind)
        tensors = MergedTensors(model, found, opened, weights.DTYPES[kind], tied_sources(model, base_folder))
        tensors.untie()
        tensors.refuse_mismatches()
        folder = staging if target is None else staging / _MERGED
        folder.mkdir(exist_ok=True)
        parts = shards.shards(tensors.outputs(), largest)
        inputs = [base_folder, *(name for name, _ in given)]
        settings = [chosen, target, kind, list(weights_of.values()), allow_pickle, largest, _releases()]
        journal = resume.Journal(staging, resume.identity(inputs, parts, settings))
        taken = journal.take(left, *dict.fromkeys((folder, staging)))
        there = sum((where / name).stat().st_size for where, names in taken.items() for name in names)
        folders.refuse_without_room(folder, _needed(tensors, base_folder, target, kind) - there)
        files = shards.write(folder, parts, tensors.values(progress), there=taken[folder], done=journal.done(folder))
        _write_rest(tensors, base_folder, folder)
        result = _Result(tuple(files), tensors.nbytes, seconds={"merge": time.perf_counter() - began})
        options = {"device_map": placement, "count": check, "tolerance": tolerance}
        verifier = _verifier(base_folder, tensors, chosen, kind, options) if check else None
        _verify(result, verifier, folder, None)
        if target is not None and (result.parity is None or result.parity.ok):
            known = {"there": taken[staging], "done": journal.done(staging)}
            _quantize(result, folder, staging, target, largest, model, kind, known)
            _verify(result, verifier, staging, target)
            shutil.rmtree(folder)
        report = MergeReport(
            out=str(out),
            base=str(base),
            adapter=" + ".join(map(str, weights_of)),
            start=start,
            dtype=kind,
            adapters={str(name): weight for name, weight in weights_of.items()},
            resumed=_resumed(taken, staging),
            quantized_as=None if target is None else target.quantize,
            **_facts(tensors, chosen),
            **result.facts(),
        )
        _finish(report, staging)
        journal.remove()
    return report


@dataclass
class _Result:
    """What has been written so far, what was measured on it, and how many seconds that took."""

    files: tuple[str, ...]
    nbytes: int
    seconds: dict[str, float]
    parity: Parity | None = None
    quantized_parity: Parity | None = None

    def facts(self) -> dict[str, Any]:
        """The fields of the report."""
        seconds = {name: round(self.seconds.get(name, 0.0), 2) for name in ("merge", "check")}
        return {**vars(self), "seconds": seconds}


def _verifier(
    base: Path, tensors: MergedTensors, chosen: weights.Start, kind: str, options: dict[str, Any]
) -> verification.Verifier:
    for adapter in tensors.adapters:
        adapters.write_copy(adapter)
    return verification.Verifier(base, tensors, chosen, kind, **options)


def _verify(
    result: _Result, verifier: verification.Verifier | None, folder: Path, target: weights.Start | None
) -> None:
    """Compare the model in ``folder``: the merged one, or the one quantized as ``target`` says."""
    if verifier is None:
        return
    began = time.perf_counter()
    if target is None:
        result.parity = verifier.merged(folder)
    else:
        result.quantized_parity = verifier.quantized(folder, target)
    result.seconds["check"] = result.seconds.get("check", 0.0) + time.perf_counter() - began


def _quantize(
    result: _Result,
    folder: Path,
    staging: Path,
    target: weights.Start,
    largest: int,
    model: Any,
    kind: str,
    known: dict[str, Any],
) -> None:
    """Write the merged model in ``folder`` quantized into ``staging``; ``known`` is for :func:`shards.write`."""
    began = time.perf_counter()
    files, result.nbytes = quantized.write(folder, staging, model, target, kind, largest, **known)
    result.files = tuple(files)
    folders.copy_files(folders.other_files(folder), staging)
    result.seconds["merge"] += time.perf_counter() - began


def _facts(tensors: MergedTensors, chosen: weights.Start) -> dict[str, Any]:
    """What the report says about base and adapters."""
    opened = tensors.adapters
    return {
        "model_class": type(tensors.model).__name__,
        "quantization": chosen.quantize,
        "assumed": chosen.assumed,
        "peft_type": opened[0].config.peft_type.value,
        "modules": len(tensors.modules),
        "replaced": len(tensors.replaced),
        "dequantized": len(tensors.base.quantized),
        "dead": tuple(key for item in opened for key in item.unused),
        "absent": tuple(name for item in opened for name in item.absent),
        "untied": tensors.untied,
        "versions": _releases(),
    }


def _releases() -> dict[str, str]:
    return {name: version for name in _LIBRARIES if (version := versions.installed(name))}


def _weights_of(adapter: Any) -> dict[str | Path, float]:
    """Every given adapter -> its weight."""
    if not isinstance(adapter, Mapping):
        arguments.path(adapter, "adapter")
        return {adapter: 1.0}
    if not adapter:
        raise Gemma4CompatError("no adapter was given: adapter is a folder, or maps folders to weights")
    for name, weight in adapter.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise Gemma4CompatError(f"the weight of the adapter {str(name)!r} must be a number, not {weight!r}")
    return {name: float(weight) for name, weight in adapter.items()}


def _opened(
    given: Sequence[tuple[Path, float]], model: Any, scratch: Path, base: weights.Weights, allow_pickle: bool
) -> list[adapters.Adapter]:
    """The adapters, each with its own folder for a copy."""
    found = []
    for number, (folder, weight) in enumerate(given):
        own = scratch / str(number)
        own.mkdir()
        opened = adapters.open_adapter(folder, model, own, allow_pickle=allow_pickle)
        opened.weight, opened.name = weight, "default" if not number else f"merged_{number}"
        found.append(opened)
    adapters.refuse_conflicts(found, base.disk)
    return found


def _refuse_bad_options(start: str, dtype: str | None, check: int, tolerance: float | None) -> None:
    if start not in weights.BASES:
        raise Gemma4CompatError(f"start {start!r} is unknown; use one of {', '.join(weights.BASES)}")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in weights.DTYPES):
        known = ", ".join(f"{short} ({name})" for short, name in weights.DTYPES.items())
        raise Gemma4CompatError(f"dtype {dtype!r} is unknown; it is one of {known}")
    if not isinstance(check, int) or check < 0:
        raise Gemma4CompatError(f"check must be a number of prompts (0 for none), not {reprlib.repr(check)}")
    if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance >= 0):
        raise Gemma4CompatError(f"tolerance must be a difference of logits, 0 or more, not {reprlib.repr(tolerance)}")


def _needed(tensors: MergedTensors, base: Path, target: weights.Start | None, kind: str) -> int:
    """Bytes of disk space that the merge needs."""
    copies = sum(adapter.nbytes_to_copy for adapter in tensors.adapters)
    beside = folders.nbytes(folders.other_files(base))
    needed = tensors.nbytes + copies + beside
    if target is not None:
        needed += quantized.nbytes(tensors.base, tensors.outputs(), tensors.model, target, kind) + beside
    return needed


def _resumed(taken: Mapping[Path, set[str]], staging: Path) -> tuple[str, ...]:
    """Names of the files of :meth:`Journal.take`; those of a model that is quantized later begin with "merged/"."""
    names = (where.relative_to(staging) / name for where, found in taken.items() for name in found)
    return tuple(sorted(name.as_posix().removeprefix(".") for name in names))


def _write_rest(tensors: MergedTensors, base: Path, folder: Path) -> None:
    """Write everything except the weights of the merged model into ``folder``."""
    folders.copy_files(folders.other_files(base), folder)
    folders.write_config(base, folder, tensors.dtype, tensors.untied)


def _finish(report: MergeReport, staging: Path) -> None:
    """Write the report, or raise ``MergeParityError`` with it."""
    for parity in (report.quantized_parity, report.parity):
        if parity is not None and not parity.ok:
            raise MergeParityError(f"{text.verdict(parity)}; nothing was written to {report.out!r}", report)
    shards.write_text(staging / folders.REPORT, terminal.json_text(report.as_data()) + "\n")
    shards.write_text(staging / folders.REPORT_TEXT, text.report_text(report) + "\n")
