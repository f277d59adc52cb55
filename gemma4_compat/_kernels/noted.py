"""What is known about the kernels of a model's steps, on disk: a later process fuses its first graph.

A note is for models of the same shapes, on one kind of GPU, with the same libraries and these sources. It decides only
what is prepared before a capture. A kernel still runs only if a capture writes exactly its text, and a fused step is
still compared with the step as PyTorch runs it.

Notes are in the folder of compiled kernels, and count by the same rules (:mod:`kernel_files`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from gemma4_compat._kernels.kernel_files import Compiled, Files, identity

#: A note with more texts, or kinds of steps, forgets those that it has had for the longest time.
MOST_TEXTS, MOST_KINDS = 512, 64


@dataclass(frozen=True)
class Note:
    """What fused steps of models of the same shapes have shown.

    Attributes:
        texts: of the kernels that they launched.
        kinds: of these steps.
        inexact: operations without PyTorch's bits, each as ``repr`` shows its signature.
    """

    texts: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()

    def with_more(self, texts: Collection[str], kind: str, inexact: Collection[str]) -> Note:
        """The same, with what another step has shown."""
        return Note(
            tuple(dict.fromkeys((*self.texts, *texts)))[-MOST_TEXTS:],
            tuple(dict.fromkeys((*self.kinds, kind)))[-MOST_KINDS:],
            tuple(sorted(inexact)),
        )


class Notes:
    """The notes of one device.

    Args:
        files: where they are; None to keep them in this process only.
    """

    def __init__(self, files: Files | None = None) -> None:
        self._files = files
        self._known: dict[str, Note] = {}

    def of(self, shapes: str) -> Note:
        """The note on models of these shapes, which may be empty."""
        if shapes not in self._known:
            found = self._files.read([identity(shapes)]) if self._files is not None else []
            self._known[shapes] = _parsed(found[0].binary) if found else Note()
        return self._known[shapes]

    def keep(self, shapes: str, note: Note) -> None:
        """Write a note, if it is another than before."""
        if note != self.of(shapes):
            self._known[shapes] = note
            if self._files is not None:
                data = {"texts": note.texts, "kinds": note.kinds, "inexact": note.inexact}
                self._files.add(Compiled(json.dumps(data).encode(), {identity(shapes): ""}))


def _parsed(data: bytes) -> Note:
    """A note as it was written; an empty one if it is something else."""
    try:
        found = json.loads(data)
        parts = [found[name] for name in ("texts", "kinds", "inexact")]
    except (ValueError, KeyError, TypeError):
        return Note()
    if not all(isinstance(part, list) and all(isinstance(one, str) for one in part) for part in parts):
        return Note()
    return Note(*map(tuple, parts))


def shapes_of(model: Any) -> str:
    """What stands for the shapes of a model: its modules, and the shapes, dtypes and devices of their weights."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        weights = [(key, tuple(one.shape), str(one.dtype), one.device.type) for key, one in _weights(module)]
        digest.update(repr((name, type(module).__name__, weights)).encode())
    return digest.hexdigest()


def _weights(module: Any) -> Iterator[tuple[str, Any]]:
    return (item for item in module._parameters.items() if item[1] is not None)


@functools.cache
def environment() -> str:
    """What notes depend on, beside the compiler and the GPU."""
    import torch

    # The sources that write texts, and those that try them.
    digest = hashlib.sha256()
    waiting = [resources.files("gemma4_compat._kernels")]
    while waiting:
        for file in sorted(waiting.pop().iterdir(), key=lambda one: one.name):
            if file.is_dir() and file.name != "__pycache__":
                waiting.append(file)
            elif file.name.endswith((".py", ".cuh")):
                digest.update(file.name.encode() + file.read_bytes())
    bitsandbytes = getattr(sys.modules.get("bitsandbytes"), "__version__", None)
    return repr((torch.__version__, torch.version.git_version, bitsandbytes, digest.hexdigest()))
