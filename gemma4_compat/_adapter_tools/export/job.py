"""Write a saved adapter for another reader: ``gemma4_compat.export_adapter`` and ``export``.

Only one tensor of the adapter is in memory at a time (for experts, one layer's). The folder appears once everything is
written.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._adapter_tools.base import Base, build, layer_of
from gemma4_compat._adapter_tools.export import gguf, mlx, pieces, plain, servers
from gemma4_compat._adapter_tools.export.pieces import Piece, Written
from gemma4_compat._adapter_tools.export.plain import Plain
from gemma4_compat._adapter_tools.export.result import ExportReport
from gemma4_compat._engine.io import files, notice, shadowed
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import clipped, fitting, matching
from gemma4_compat._gemma4.adapters import saved as adapters
from gemma4_compat._gemma4.adapters import translation as translations
from gemma4_compat._gemma4.adapters.saved import CONFIG, REFUSALS, WEIGHTS, SavedAdapter, first_line
from gemma4_compat._gemma4.checkpoint import folders, shards
from gemma4_compat._gemma4.checkpoint.shards import Entry

_Writer = Callable[[Plain, Base, Callable[[Entry], Any], str], Written]
_WRITERS: Mapping[str, tuple[str, str, _Writer]] = {
    "vllm": ("vLLM", servers.VLLM, servers.vllm),
    "sglang": ("SGLang", servers.SGLANG, servers.sglang),
    "mlx": ("mlx", mlx.RELEASE, mlx.write),
    "gguf": ("llama.cpp", gguf.RELEASE, gguf.write),
}
TARGETS = (*_WRITERS, "peft")
#: Programs that read what another name stands for.
_MEANT = {"llama.cpp": "gguf", "ollama": "gguf", "mlx-lm": "mlx", "mlx-vlm": "mlx"}
_SHARED = ("self_attn.k_proj", "self_attn.v_proj")


def export_adapter(
    adapter: str | os.PathLike[str], out: str | os.PathLike[str], target: str, *, base: Any = None
) -> ExportReport:
    """Write a saved PEFT adapter in the keys and the configuration that another reader takes.

    >>> report = gemma4_compat.export_adapter("my-adapter", "for-vllm", "vllm", base="E4B")
    >>> report.command
    'vllm serve google/gemma-4-E4B-it --enable-lora --max-lora-rank 16 --lora-modules my-adapter=/home/me/for-vllm'

    The outputs there are the adapter's: modules of several ranks and scales get one, layers that a server joins get
    all their parts, and anything a reader would leave out or compute differently is refused (docs/ADAPTERS.md). Only
    one tensor is in memory at a time (for experts, one layer's). ``out`` appears once everything is written.

    Args:
        adapter: its folder, or the id of one in the cache of the hub; keys of any Gemma 4 class are understood.
        out: a folder that does not exist, or is empty.
        target: "vllm", "sglang", "mlx" or "mlx-lm" or "mlx-vlm", "gguf" or "llama.cpp" or "ollama", or "peft" (without
            this package).
        base: a folder with a ``config.json``, the id of a cached model, a variant ("E2B", "E4B", "12B", "26B-A4B",
            "31B"), or a Gemma 4 configuration; default: the id that the adapter names. Adapters on experts take the
            folder with its weights for "gguf".

    Returns:
        What was written, what was changed for the reader, and the command that loads it.

    Raises:
        Gemma4CompatError: the reader does not support it, or it cannot be read; the message says why and what to
            do instead, and nothing is left behind.
    """
    target = _MEANT.get(str(target), target)
    if target not in TARGETS:
        raise Gemma4CompatError(f"the reader {target!r} is unknown; it is one of {', '.join(TARGETS)}")
    shadowed.refuse("torch", "transformers", "peft")
    found = adapters.read(adapter)
    if not found.tensors:
        raise Gemma4CompatError(f"the adapter in {str(found.folder)!r} has no weights: {WEIGHTS} is empty")
    built = build(_named(found.config.get("base_model_name_or_path")) if base is None else base)
    names = list(built.paths.values())
    shapes = {key: tensor.shape for key, tensor in found.tensors.items()}
    adapters.refuse_unbounded(found.folder, found.config, shapes, names)
    inputs = [found.folder, *([Path(built.name)] if files.exists(Path(built.name), "folder") else [])]
    folder = folders.output(os.fspath(out), *inputs, what="exported adapter")
    config, entries, dead = _translated(found, built)
    with folders.staging(folder, "export") as staging:
        folders.refuse_without_room(staging, 2 * sum(entry.nbytes for entry in entries.values()), "the adapter")
        if target == "peft":
            report = _write_peft(found, config, entries, built, staging)
        else:
            report = _write_plain(target, found, config, entries, built, staging)
        written = sorted(file for file in staging.iterdir() if not file.name.startswith("."))
        report |= {"files": tuple(file.name for file in written), "nbytes": folders.nbytes(written)}
    report["command"] = report["command"].replace("OUT", str(folder))
    if message := report.pop("warning", ""):
        notice.warn(f"{message}.")
        report["notes"] = (message, *report["notes"])
    report["notes"] = (*filter(None, [built.assumed]), *report["notes"])
    return ExportReport(
        out=str(folder),
        adapter=str(found.folder),
        target=target,
        base=built.name,
        model_class=type(built.model).__name__,
        dead=(*dead, *report.pop("dead", ())),
        **report,
    )


def _named(trained_on: Any) -> str:
    """The base that the adapter names, which is untrusted: it is never followed as a path."""
    if not isinstance(trained_on, str) or not trained_on:
        raise Gemma4CompatError("the adapter does not say which base it was trained on; give it (--base)")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", trained_on) and not files.exists(
        Path(trained_on), "folder"
    ):
        return trained_on
    raise Gemma4CompatError(
        f"the adapter was trained on {trained_on!r}, which is not a hub id; give the base (--base): a folder, an id, "
        "or a variant such as E4B"
    )


def _translated(found: SavedAdapter, built: Base) -> tuple[Any, dict[str, Entry], tuple[str, ...]]:
    """PEFT's configuration for this base, the tensors by PEFT's keys for it, and unused keys."""
    import peft
    from peft.tuners import tuners_utils

    entries = shards.entries(found.folder / WEIGHTS)
    keys = tuple(entries)
    renamed = fitting.translate(keys, built.model)
    if not renamed.names:
        raise fitting.nothing_matched(found.folder, built.model, keys)
    if renamed.unmatched:
        raise Gemma4CompatError(
            f"{len(renamed.unmatched)} keys of the adapter in {str(found.folder)!r} belong to no module of "
            f"{type(built.model).__name__}, {renamed.unmatched[0]!r} among them. Give the base it was trained on "
            "(--base)"
        )
    with warnings.catch_warnings(), fitting.loading(found.folder, keys):
        warnings.simplefilter("ignore")
        try:
            config = peft.PeftConfig.from_pretrained(str(found.folder))
            if getattr(config, "target_modules", None):
                config = tuners_utils._maybe_include_all_linear_layers(config, built.model)
                fitting.fit(config, built.model, keys)
                clipped.redirect(config, built.model)
        except REFUSALS as error:
            raise Gemma4CompatError(
                f"PEFT {peft.__version__} does not understand {str(found.folder / CONFIG)!r}: {first_line(error)}"
            ) from error
    return config, {new: entries[old] for old, new in renamed.names.items()}, renamed.unused


def _write_plain(
    target: str, found: SavedAdapter, config: Any, entries: Mapping[str, Entry], built: Base, staging: Path
) -> dict[str, Any]:
    title, release, writer = _WRITERS[target]
    dead = {key: entry for key, entry in entries.items() if _is_dead(key, built)}
    if len(dead) == len(entries):
        raise Gemma4CompatError("the adapter only changes keys and values that this model never uses")
    alive = {key: entry for key, entry in entries.items() if key not in dead}
    lora = plain.read(found, config, alive, built.model, title)
    written = writer(lora, built, plain.cached_reader(), built.name)
    if target == "gguf":
        gguf.save(staging, written, lora)
    else:
        pieces.save(staging, mlx.WEIGHTS if target == "mlx" else WEIGHTS, written.pieces)
        pieces.save_json(staging, CONFIG, written.config or {})
    return {
        "reader": release,
        "modules": len(lora.modules),
        "rank": lora.rank,
        "scale": lora.scale,
        "padded": tuple(one.where for one in lora.padded()),
        "rescaled": tuple(one.where for one in lora.rescaled()),
        "added": written.added,
        "dead": tuple(entry.name for entry in dead.values()),
        "command": written.command,
        "notes": written.notes,
        "warning": written.warning,
    }


def _is_dead(key: str, built: Base) -> bool:
    """Whether the key belongs to keys or values of a KV-shared layer. Releases differ in whether it has such
    modules.
    """
    layer = layer_of(".".join(translations.shared_part(key)[:4]))
    return layer is not None and layer[1] in _SHARED and built.shares(layer[0])


def _write_peft(
    found: SavedAdapter, config: Any, entries: Mapping[str, Entry], built: Base, staging: Path
) -> dict[str, Any]:
    """What PEFT itself would have saved from this base; it loads there without this package."""
    import peft

    copies = [
        Piece(key, entry.dtype, entry.shape, functools.partial(shards.read, entry)) for key, entry in entries.items()
    ]
    pieces.save(staging, WEIGHTS, copies)
    names = list(built.paths.values())
    tuned = {name for key in entries if (name := translations.module_name(_owner(key, names), names))}
    if getattr(config, "target_modules", None) and matching.targeted(config, names) - tuned:
        config.target_modules = matching.targeted(config, names) & tuned or config.target_modules
    changed = {name: _plain_value(value) for name, value in vars(config).items() if name in _NAMES}
    pieces.save_json(staging, CONFIG, {**found.config, **changed})
    return {
        "reader": f"PEFT {peft.__version__}",
        "modules": len(tuned),
        "rank": None,
        "scale": None,
        "padded": (),
        "rescaled": (),
        "added": (),
        "command": f"PeftModel.from_pretrained(model, {'OUT'!r}) with a {type(built.model).__name__}",
        "notes": (),
    }


#: Settings that name modules and so depend on the class.
_NAMES = (
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "feedforward_modules",
    "target_parameters",
    "trainable_token_indices",
)


def _plain_value(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def _owner(key: str, names: list[str]) -> str:
    path = re.sub(r"\.base_layer\b", "", key.removeprefix(translations.PREFIX))
    known = set(names)
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path
