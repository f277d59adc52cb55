"""Merge an adapter into its base layer by layer, and compare outputs before the merged model gets its name.

Memory: the tensors of the adapter, and three float32 copies of the current module's weights (the base's, the adapter's
difference, their sum); tensors without an adapter are copied in pieces of 64 MiB. The whole model is never in memory,
nor is a shard. The check afterwards loads two models, one after the other.

Everything is written into a folder beside the final one, which is renamed when parity is within bounds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemma4_compat._checkpoint import shards
from gemma4_compat._engine import shadowed, terminal, versions
from gemma4_compat._engine.text import parse_size
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._merge import adapter as adapters
from gemma4_compat._merge import folders, text, verification, weights
from gemma4_compat._merge import start as starts
from gemma4_compat._merge.result import MergeParityError, MergeReport
from gemma4_compat._merge.tensors import MergedTensors, tied_sources
from gemma4_compat._models import build

_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")


def merge_adapter(
    base: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    start: str = "original",
    quantize: Any = None,
    skip_modules: Sequence[str] | None = None,
    dtype: str | None = None,
    device_map: Any = None,
    max_shard_size: int | str = "5GB",
    check: int = 4,
    tolerance: float | None = None,
    allow_pickle: bool = False,
    progress: bool | None = None,
) -> MergeReport:
    """Merge ``adapter`` into ``base`` and write the result to ``out``; see :func:`gemma4_compat.merge_adapter`."""
    _refuse_bad_options(start, dtype, check, tolerance)
    largest = parse_size(max_shard_size)
    if not largest:
        raise Gemma4CompatError("max_shard_size must be more than 0; write it as 5GB")
    shadowed.refuse("torch", "transformers", "peft")
    base_folder, adapter_folder = folders.local(base, "base"), folders.local(adapter, "adapter")
    out = folders.output(out, base_folder, adapter_folder)
    model = _on_meta(base_folder)
    placement = verification.placement(model, device_map)
    chosen = starts.choose(model, start, quantize, skip_modules)
    entries = shards.checkpoint(base_folder)
    kind = dtype or starts.stored_dtype(model, entries, chosen)
    with folders.staging(out) as staging, tempfile.TemporaryDirectory(dir=staging, prefix=".adapter-") as scratch:
        began = time.perf_counter()
        opened = adapters.open_adapter(adapter_folder, model, Path(scratch), allow_pickle=allow_pickle)
        found = weights.find_base(entries, model)
        starts.apply(chosen, found, model, kind)
        tensors = MergedTensors(model, found, opened, starts.DTYPES[kind], tied_sources(model, base_folder))
        tensors.untie()
        tensors.refuse_mismatches()
        files = _write(tensors, base_folder, staging, largest, progress)
        merged = time.perf_counter()
        parity = None
        if check:
            adapters.write_copy(opened)
            options: dict[str, Any] = {"device_map": placement, "count": check, "tolerance": tolerance}
            parity = verification.verify(staging, base_folder, tensors, chosen, kind, **options)
        seconds = {"merge": round(merged - began, 2), "check": round(time.perf_counter() - merged, 2)}
        report = MergeReport(
            out=str(out),
            base=str(base),
            adapter=str(adapter),
            model_class=type(model).__name__,
            start=start,
            quantization=chosen.quantize,
            assumed=chosen.assumed,
            dtype=kind,
            peft_type=opened.config.peft_type.value,
            modules=len(opened.modules),
            replaced=len(opened.replaced),
            dequantized=len(found.quantized),
            dead=opened.unused,
            absent=opened.absent,
            untied=tensors.untied,
            files=tuple(files),
            nbytes=tensors.nbytes,
            seconds=seconds,
            versions={name: version for name in _LIBRARIES if (version := versions.installed(name))},
            parity=parity,
        )
        _finish(report, staging)
    return report


def _refuse_bad_options(start: str, dtype: str | None, check: int, tolerance: float | None) -> None:
    if start not in starts.BASES:
        raise Gemma4CompatError(f"base {start!r} is unknown; it is one of {', '.join(starts.BASES)}")
    if dtype is not None and dtype not in starts.DTYPES:
        raise Gemma4CompatError(f"dtype {dtype!r} is unknown; it is one of {', '.join(starts.DTYPES)}")
    if check < 0:
        raise Gemma4CompatError(f"check is a number of prompts, 0 for none, not {check}")
    if tolerance is not None and not tolerance >= 0:
        raise Gemma4CompatError(f"tolerance is a difference of logits, 0 or more, not {tolerance}")


def _on_meta(folder: Path) -> Any:
    try:
        return build.on_meta(str(folder))[0]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        line = " ".join(str(error).split())
        raise Gemma4CompatError(f"no model can be built from config.json in {str(folder)!r}: {line}") from error


def _write(tensors: MergedTensors, base: Path, staging: Path, largest: int, progress: bool | None) -> list[str]:
    """Write the merged model into ``staging``; returns the names of its weight files."""
    needed = tensors.nbytes + tensors.adapter.nbytes_to_copy + folders.nbytes(folders.other_files(base))
    folders.refuse_without_room(staging, needed)
    files = shards.write(staging, shards.shards(tensors.outputs(), largest), tensors.values(progress))
    folders.copy_other_files(base, staging)
    folders.write_config(base, staging, tensors.dtype, tensors.untied)
    return files


def _finish(report: MergeReport, staging: Path) -> None:
    """Write the report, or raise ``MergeParityError`` with it."""
    parity = report.parity
    if parity is not None and not parity.ok:
        raise MergeParityError(f"{text.verdict(parity)}; nothing was written to {report.out!r}", report)
    shards.write_text(staging / folders.REPORT, terminal.json_text(report.as_data()) + "\n")
    shards.write_text(staging / folders.REPORT_TEXT, text.report_text(report) + "\n")
