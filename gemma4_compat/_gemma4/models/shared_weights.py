"""Keys and values of KV-shared layers: weights that released checkpoints have and transformers' models lack.

The last ``num_kv_shared_layers`` layers of a text model compute with keys and values of earlier layers. transformers
has no modules for their own and drops the weights on load; other readers of the checkpoint ask for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._gemma4.checkpoint.shards import Entry

_NAME = re.compile(r"layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm)\.weight")
#: The one weight with the same name in every language model: it shows the prefix.
_ANCHOR = "embed_tokens.weight"
_SOURCE = attached.SHARED_WEIGHTS


def prefix(names: Iterable[str]) -> str | None:
    """The prefix of the language model's names; None if it is unknown."""
    found = [name[: -len(_ANCHOR)] for name in names if name == _ANCHOR or name.endswith(f".{_ANCHOR}")]
    return found[0] if len(found) == 1 else None


def shared(layers: int, sharing: int) -> range:
    """The KV-shared layers of a text model with so many layers, so many of them KV-shared. If all are, it shares with
    another model, and its checkpoint has none of these weights.
    """
    return range(layers - sharing, layers) if 0 < sharing < layers else range(0)


def select(names: Iterable[str], before: str, layers: range) -> dict[str, str]:
    """The keys and values of these KV-shared layers: name in the language model -> name.

    ``layers.15.self_attn.k_proj.weight`` is a name in the language model. ``before``: see :func:`prefix`.
    """
    found = {}
    for name in names:
        match = _NAME.fullmatch(name, len(before)) if name.startswith(before) else None
        if match is not None and int(match[1]) in layers:
            found[name[len(before) :]] = name
    return found


def query(name: str) -> str:
    """The weight of the same layer's queries that corresponds to a key's or value's: it tells the dtype."""
    return re.sub(r"\.[kv]_(proj|norm)\.", r".q_\1.", name)


def remember(model: Any, dropped: Iterable[str], files: Iterable[str] | None) -> None:
    """Note on a model where the keys and values are that its load ``dropped``. They are not read.

    ``files``: of the checkpoint; None if it was loaded from a state dict.
    """
    vars(model).pop(_SOURCE, None)
    layers = _layers(model)
    if not layers:
        return
    # The language model's prefix is unknown here: no anchor is among the dropped names.
    found = {match[0] for name in dropped if (match := _NAME.search(name)) and name.endswith(match[0])}
    names = sorted(name for name in found if int(name.split(".")[1]) in layers)
    if names:
        # Plain data: copying or pickling the model takes it along.
        vars(model)[_SOURCE] = {"names": names, "files": [str(Path(file).absolute()) for file in files or ()]}


def _layers(model: Any) -> range:
    text = model.config.get_text_config()
    return shared(getattr(text, "num_hidden_layers", 0), getattr(text, "num_kv_shared_layers", 0) or 0)


def added(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with the keys and values that the checkpoint of ``model`` had, read from its files, in the dtype of
    the same layer's queries.

    Layers that are not in ``state`` get none, nor does a quantized model: its readers would take them for quantized
    weights. If the files can no longer be read, a warning says so.
    """
    source = vars(model).get(_SOURCE)
    if source is None or getattr(model, "hf_quantizer", None) is not None:
        return state
    before = prefix(state)
    if before is None:
        return state
    wanted = [name for name in source["names"] if before + query(name) in state and before + name not in state]
    if not wanted:
        return state
    try:
        tensors = _read(source["files"], wanted, _layers(model))
    except Gemma4CompatError as error:
        notice.warn(
            f"the checkpoint is saved without {len(wanted)} keys and values of KV-shared layers, which the one it was "
            f"loaded from had: {error}. transformers loads it; servers may refuse it. To add them, run: "
            "gemma4-compat repair CHECKPOINT --from ORIGINAL OUT",
            notice.LIBRARIES,  # never an exception: the save goes on
        )
        return state
    return state | {
        before + name: tensor.to(state[before + query(name)].dtype) for name, tensor in zip(wanted, tensors)
    }


def _read(files: list[str], names: list[str], layers: range) -> list[Any]:
    """The tensors with these names in the language model."""
    if not files:
        raise Gemma4CompatError("it was loaded from a state dict, which is not kept")
    found = _there(files, layers)
    if missing := [name for name in names if name not in found]:
        raise Gemma4CompatError(f"{files[0]!r} no longer has {missing[0]}")
    return [shards.read(found[name]) for name in names]


def _there(files: list[str], layers: range) -> Mapping[str, Entry]:
    """The keys and values in these files or, if the files are gone, in the checkpoint that replaced them."""
    paths = [Path(file) for file in files]
    folder = paths[0].parent
    if not all(path.exists() for path in paths) and (folder / "model.safetensors").exists():
        paths = [folder / "model.safetensors"]  # saved in place, in one file; transformers leaves the index of the old
    if all(path.exists() for path in paths):
        entries = {name: entry for path in paths for name, entry in shards.entries(path).items()}
    else:  # saved in place, in other shards
        entries = shards.checkpoint(folder)
    before = prefix(entries)
    if before is None:
        raise Gemma4CompatError(f"{str(folder)!r} no longer has a language model")
    return {name: entries[key] for name, key in select(entries, before, layers).items()}
