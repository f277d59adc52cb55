"""The tensors of a merged model: their names, and their values piece by piece."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gemma4_compat._adapter_tools.merge import one_module
from gemma4_compat._adapter_tools.merge.adapter import Adapter, kind_of
from gemma4_compat._adapter_tools.merge.weights import Weights
from gemma4_compat._engine.io import json_files
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._gemma4.checkpoint.shards import Entry, Output


def tied_sources(model: Any, base: Path) -> dict[str, str]:
    """Tied parameters -> the parameter that holds their values."""
    data = json_files.settings(base / "config.json")
    tied = model.config.get_text_config().tie_word_embeddings if "text_config" not in data else None
    if not (model.config.tie_word_embeddings if tied is None else tied):
        return {}
    keys = model._tied_weights_keys or {}
    return dict(keys) if isinstance(keys, dict) else {}


class MergedTensors:
    """Which tensors a merge writes, and their values.

    Args:
        model: the model on meta.
        base: the weights to start from.
        adapters: what to merge.
        dtype: of the merged weights, as torch calls it.
        sources: see :func:`tied_sources`.
    """

    def __init__(
        self, model: Any, base: Weights, adapters: Sequence[Adapter], dtype: str, sources: dict[str, str]
    ) -> None:
        self.model = model
        self.base = base
        self.adapters = list(adapters)
        self.dtype = dtype
        self.sources = sources
        self.untied = False
        self._owned: dict[str, str] = {}
        for path in self.modules:
            for name, _ in model.get_submodule(path).named_parameters():
                self._owned[f"{path}.{name}"] = path
        self._merged: dict[str, Any] = {}  # for a module with several parameters, until each is written

    @property
    def modules(self) -> list[str]:
        """Paths of the modules that the adapters change."""
        return list(dict.fromkeys(path for adapter in self.adapters for path in adapter.modules))

    @property
    def replaced(self) -> dict[str, Entry]:
        """Names of the tensors that an adapter replaces -> their values."""
        return {name: adapter.entries[key] for adapter in self.adapters for name, key in adapter.replaced.items()}

    def _changes(self, name: str) -> bool:
        return name in self._owned or any(name in adapter.replaced for adapter in self.adapters)

    def untie(self) -> None:
        """Decide whether tied parameters (the head and its embedding) can stay tied; if so, drop their copies."""
        for target, source in self.sources.items():
            if not self._changes(target) and not self._changes(source):
                continue
            if self._stays_tied(target, source):
                self._owned.pop(target, None)
                for adapter in self.adapters:
                    adapter.replaced.pop(target, None)
                self.base.disk.pop(target, None)  # some checkpoints store it twice; the copy would be stale
                self.base.keys.pop(target, None)
            else:
                self.untied = True

    def _stays_tied(self, target: str, source: str) -> bool:
        if not self._changes(target):
            path = source.rpartition(".")[0]
            # PEFT applies both of these to the head as well, and saves one of them.
            return all(
                kind_of(adapter.modules.get(path, []), adapter.config, path) == "tokens"
                or bool(getattr(adapter.config, "ensure_weight_tying", False))
                or not (path in adapter.modules or _is_copied(path, adapter.config))  # the base's own: new tokens
                for adapter in self.adapters
                if path in adapter.modules or source in adapter.replaced
            )
        if not self._changes(source):
            return False
        return self._digest(target) == self._digest(source)

    def _digest(self, name: str) -> str:
        digest = hashlib.sha256()
        for piece in self._pieces(name):
            digest.update(shards.as_bytes(piece))
        return digest.hexdigest()

    def refuse_mismatches(self) -> None:
        """Raise ``Gemma4CompatError`` if a whole tensor of the adapter has another shape than the base's."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for name, entry in self.replaced.items():
            known = self.model.get_parameter(name) if name in parameters else self.model.get_buffer(name)
            if tuple(known.shape) != entry.shape:
                raise Gemma4CompatError(
                    f"the adapter's {entry.name!r} is {list(entry.shape)}, the base's {name} {list(known.shape)}: the "
                    "adapter was made for a base of another size (a resized vocabulary?); give that one. Without it, "
                    f"merge in memory: load the base, resize_token_embeddings({entry.shape[0]}), "
                    "PeftModel.from_pretrained, merge_and_unload, save_pretrained"
                )
        for name in self._owned:
            if self.sources.get(name, name) not in self.base.disk:
                raise Gemma4CompatError(f"the base has no weight {name!r}, which the adapter changes")

    def outputs(self) -> list[Output]:
        """Every tensor of the merged model, in the base's order."""
        found = []
        names = {key: name for name, key in self.base.keys.items()}
        for key, entry in self._on_disk().items():
            name = names.get(key)
            shape = entry.shape if name is None else self.base.shape(name)
            found.append(Output(key, self._dtype(name, entry.dtype), tuple(shape)))
        if self.untied:
            for target, source in self.sources.items():
                if target not in self.base.disk:
                    entry = self.base.disk[source]
                    found.append(Output(target, self._dtype(target, entry.dtype), tuple(self.base.shape(source))))
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum(output.nbytes for output in self.outputs())

    def _on_disk(self) -> dict[str, Entry]:
        entries = {self.base.keys[name]: entry for name, entry in self.base.disk.items()} | self.base.rest
        return dict(sorted(entries.items(), key=lambda item: (str(item[1].file), item[1].start)))

    def _dtype(self, name: str | None, dtype: str) -> str:
        if name is not None and (name in self.base.stored or self._changes(name)):
            return self.dtype
        return self.dtype if shards.dtype_of(dtype).is_floating_point else dtype

    def values(self, progress: bool | None) -> dict[str, Callable[[], Iterator[Any]]]:
        """For each output, the function that yields its pieces."""
        names = {key: name for name, key in self.base.keys.items()}

        def pieces(key: str) -> Iterator[Any]:
            return self._cast(key, self._pieces(names.get(key, key)))

        values = {output.name: functools.partial(pieces, output.name) for output in self.outputs()}
        return shards.with_bar(values, "merging", progress)

    def _pieces(self, name: str) -> Iterator[Any]:
        if name in self._owned:
            if name not in self._merged:
                path = self._owned[name]
                self._merged |= one_module.merged(path, self.model, self.base, self.adapters, self.sources)
            yield self._merged.pop(name)
        elif name in self.replaced:
            yield from shards.pieces(self.replaced[name])
        elif name in self.base.rest:
            yield from shards.pieces(self.base.rest[name])
        else:
            yield from self.base.pieces(name if name in self.base.disk else self.sources[name])

    def _cast(self, key: str, pieces: Iterator[Any]) -> Iterator[Any]:
        import torch

        wanted = shards.dtype_of(self.dtype)
        for piece in pieces:
            if not piece.is_floating_point() or piece.dtype == wanted:
                yield piece
                continue
            cast = piece.to(wanted)
            lost = torch.isfinite(piece) & ~torch.isfinite(cast)
            if piece.numel() > 1 and lost.any():  # a single value is a clipping bound
                raise Gemma4CompatError(
                    f"{key} has {int(lost.sum())} values that {self.dtype} cannot hold, {piece[lost].abs().max():.6g} "
                    f"among them (the largest is {torch.finfo(wanted).max:.6g}); merge to bf16 or fp32"
                )
            yield cast


def _is_copied(path: str, config: Any) -> bool:
    return any(f".{path}".endswith(f".{name}") for name in getattr(config, "modules_to_save", None) or ())
