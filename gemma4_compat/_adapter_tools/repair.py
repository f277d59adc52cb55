"""Add to a checkpoint what other readers need and transformers did not save: ``gemma4-compat repair``.

Only headers are read as a whole. Tensors are copied once, in pieces of 64 MiB.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import formats, json_files
from gemma4_compat._engine.io.text import parse_size, size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import folders, shards
from gemma4_compat._gemma4.checkpoint.shards import Entry, Output
from gemma4_compat._gemma4.models import config_names, shared_weights


@dataclass(frozen=True, kw_only=True)
class RepairReport:
    """What was added to a checkpoint.

    Attributes:
        out: folder of the repaired checkpoint.
        checkpoint: as given; ``original`` likewise.
        tensors: names of the tensors that were added.
        dtypes: the dtypes they were written in, as torch calls them, in order.
        settings: dotted name in ``config.json`` -> the value that was added.
        files: names of the weight files.
        nbytes: of all weights.
        added_nbytes: of the added tensors.
        seconds: of the repair.
    """

    out: str
    checkpoint: str
    original: str
    tensors: tuple[str, ...]
    dtypes: tuple[str, ...]
    settings: dict[str, int | None]
    files: tuple[str, ...]
    nbytes: int
    added_nbytes: int
    seconds: float

    def as_data(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Model:
    """A checkpoint: its name in messages, its settings, its tensors, the names of its language model."""

    title: str
    settings: dict[str, Any]
    entries: dict[str, Entry]
    before: str

    @property
    def text(self) -> dict[str, Any]:
        part = self.settings.get("text_config")
        return part if isinstance(part, dict) else self.settings

    @property
    def layers(self) -> range:
        return shared_weights.shared(
            self.text.get("num_hidden_layers") or 0, self.text.get("num_kv_shared_layers") or 0
        )


def repair_checkpoint(
    checkpoint: str | Path,
    original: str | Path,
    out: str | Path,
    *,
    max_shard_size: int | str = "5GB",
    progress: bool | None = None,
) -> RepairReport:
    """Give a checkpoint that ``save_pretrained`` wrote back what servers ask for, and transformers dropped.

    >>> gemma4_compat.repair_checkpoint("my-model", "gemma-4-E2B-it", "repaired").tensors[0]
    'model.language_model.layers.15.self_attn.k_norm.weight'

    That is ``k_proj``, ``v_proj`` and ``k_norm`` of KV-shared layers (E2B, E4B), from the original, in the dtype that
    the same layer's queries have in the checkpoint; and ``global_head_dim`` and ``num_global_key_value_heads`` in
    ``config.json``, from the checkpoint's own ``per_layer_config``. Outputs of transformers do not depend on them. All
    other tensors, and the files beside the weights, are copied as they are. In host memory is a piece of a tensor, of
    64 MiB. ``out`` appears when all is done. The inputs are only read.

    Args:
        checkpoint: the folder of a Gemma 4 checkpoint in safetensors that is not quantized, or the id of a cached one.
        original: the folder of the checkpoint it was made from, as it was downloaded, or the id of a cached one.
        out: a folder that does not exist, or is empty.
        max_shard_size: of a file with weights.
        progress: show a progress bar; default: on a terminal.

    Returns:
        What was added.

    Raises:
        Gemma4CompatError: it cannot be done, or nothing is missing; the message says why, and nothing is left behind.
    """
    largest = parse_size(max_shard_size)
    if not largest:
        raise Gemma4CompatError("max_shard_size must be more than 0; write it as 5GB")
    broken, source = folders.local(checkpoint, "checkpoint"), folders.local(original, "original")
    out = folders.output(out, broken, source)
    began = time.perf_counter()
    given, other = _open(broken), _open(source)
    lost = _lost(given, other)
    settings = _with_names(given)
    if not lost and settings == given.settings:
        raise Gemma4CompatError(
            f"{str(checkpoint)!r} lacks nothing that readers ask for and {str(original)!r} has; there is nothing to "
            "repair"
        )
    entries = given.entries | {name: entry for name, (entry, _) in lost.items()}
    dtypes = {name: lost[name][1] if name in lost else entry.dtype for name, entry in entries.items()}
    outputs = [Output(name, dtypes[name], entry.shape) for name, entry in entries.items()]
    nbytes = sum(output.nbytes for output in outputs)
    with folders.staging(out, "repair") as staging:
        beside = folders.other_files(broken, all_but_config=True)
        needed = nbytes + folders.nbytes(beside)
        folders.refuse_without_room(staging, needed, "the repaired checkpoint")
        files = shards.write(staging, shards.shards(outputs, largest), _values(entries, dtypes, progress))
        folders.copy_files(beside, staging)
        shards.write_text(staging / "config.json", json.dumps(settings, indent=2) + "\n")
        return RepairReport(
            out=str(out),
            checkpoint=str(checkpoint),
            original=str(original),
            tensors=tuple(lost),
            dtypes=tuple(sorted({dtype for _, dtype in lost.values()})),
            settings=_added(given.settings, settings),
            files=tuple(files),
            nbytes=nbytes,
            added_nbytes=sum(output.nbytes for output in outputs if output.name in lost),
            seconds=round(time.perf_counter() - began, 2),
        )


def _open(folder: Path) -> _Model:
    settings = json_files.settings(folder / "config.json", formats.ModelConfig)
    title = str(folder)
    kind = str(settings.get("model_type"))
    if not kind.startswith("gemma4"):
        raise Gemma4CompatError(f"{title!r} is not a Gemma 4 model: its config.json says model_type {kind!r}")
    entries = shards.checkpoint(folder)
    before = shared_weights.prefix(entries)
    if before is None:
        raise Gemma4CompatError(
            f"{title!r} has no embed_tokens.weight, or several; give the checkpoint of a whole model"
        )
    return _Model(title, settings, entries, before)


def _lost(given: _Model, other: _Model) -> dict[str, tuple[Entry, str]]:
    """Name in the repaired checkpoint -> the tensor of the original that it lacks, and the dtype to write it in."""
    _refuse_strangers(given, other)
    has = shared_weights.select(given.entries, given.before, given.layers)
    there = shared_weights.select(other.entries, other.before, other.layers)
    if given.layers and not has and not there:
        raise Gemma4CompatError(
            f"{other.title!r} has no keys and values of KV-shared layers either: transformers also saved that one. "
            "Give the checkpoint that was downloaded"
        )
    found = {}
    for name, key in there.items():
        if name in has:
            continue
        like = given.entries.get(given.before + shared_weights.query(name))
        if like is None:
            raise Gemma4CompatError(
                f"{given.title!r} has no {given.before + shared_weights.query(name)}; it is incomplete"
            )
        if not shards.dtype_of(like.dtype).is_floating_point or "quantization_config" in given.settings:
            raise Gemma4CompatError(
                f"{given.title!r} is quantized: readers would mistake plain weights in it for quantized ones. Repair "
                "the checkpoint it was made from, and quantize that"
            )
        found[given.before + name] = (other.entries[key], like.dtype)
    return found


def _refuse_strangers(given: _Model, other: _Model) -> None:
    """Raise ``Gemma4CompatError`` unless the language models have layers of the same number, kinds and shapes."""
    for setting in ("num_hidden_layers", "num_kv_shared_layers", "layer_types"):
        ours, theirs = given.text.get(setting), other.text.get(setting)
        if ours is not None and theirs is not None and ours != theirs:
            raise Gemma4CompatError(
                f"{given.title!r} was not made from {other.title!r}: {setting} is {_short(ours)} in the one and "
                f"{_short(theirs)} in the other"
            )
    layer = f"{given.before}layers."
    for name, entry in given.entries.items():
        if not name.startswith(layer):
            continue
        like = other.entries.get(other.before + name[len(given.before) :])
        floats = like is not None and all(shards.dtype_of(item.dtype).is_floating_point for item in (entry, like))
        if like is not None and floats and like.shape != entry.shape:
            raise Gemma4CompatError(
                f"{given.title!r} was not made from {other.title!r}: {name} is {list(entry.shape)} in the one and "
                f"{list(like.shape)} in the other"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _with_names(given: _Model) -> dict[str, Any]:
    """The settings with the names of :mod:`config_names`."""
    names = config_names.restored(given.text)
    if given.text is given.settings:
        return given.settings | names
    return given.settings | {"text_config": given.text | names}


def _added(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int | None]:
    added = {name: value for name, value in after.items() if name not in before}
    old, new = before.get("text_config"), after.get("text_config")
    if isinstance(old, dict) and isinstance(new, dict):
        added |= {f"text_config.{name}": value for name, value in new.items() if name not in old}
    return added


def _values(
    entries: Mapping[str, Entry], dtypes: Mapping[str, str], progress: bool | None
) -> dict[str, Callable[[], Iterator[Any]]]:
    """For each tensor, the function that yields its pieces in the dtype it is written in."""

    def pieces(name: str) -> Iterator[Any]:
        wanted = shards.dtype_of(dtypes[name])
        for piece in shards.pieces(entries[name]):
            yield piece.to(wanted)

    return shards.with_bar({name: functools.partial(pieces, name) for name in entries}, "repairing", progress)


def report_text(report: RepairReport) -> str:
    """The report as text."""
    lines = [f"{report.out}: {len(report.files)} weight file(s), {size_text(report.nbytes)}, {report.seconds} s"]
    if report.tensors:
        lines.append(
            f"added {len(report.tensors)} tensors of KV-shared layers, {size_text(report.added_nbytes)} in "
            f"{', '.join(report.dtypes)}: {report.tensors[0]}, ..."
        )
    else:
        lines.append("no tensors were missing")
    for name, value in report.settings.items():
        lines.append(f"added to config.json: {name} = {json.dumps(value)}")
    return "\n".join(lines)
