"""The folders of a merge: the inputs it reads, and the output folder, which appears complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemma4_compat._checkpoint import shards
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._reading import json_files

REPORT, REPORT_TEXT = "merge_report.json", "merge_report.txt"

#: Files of the base that are not copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_REPLACED = ("config.json", "README.md", ".gitattributes", REPORT, REPORT_TEXT)


def local(given: str | Path, what: str) -> Path:
    """The given folder, or the folder of a cached id.

    Raises:
        Gemma4CompatError: there is neither.
    """
    folder = Path(given)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise Gemma4CompatError(f"{str(given)!r} is a file; give the folder of the {what}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(given), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, FileNotFoundError) as error:
        raise Gemma4CompatError(
            f"the {what} {str(given)!r} is neither a folder nor in the cache of the hub; fetch it with: "
            f"hf download {given}"
        ) from error


def refuse_existing(out: Path) -> None:
    """Raise ``Gemma4CompatError`` unless ``out`` is new or an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise Gemma4CompatError(f"{str(out)!r} exists; nothing is overwritten. Give a new folder, or remove that one")


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` that is renamed to it at the end, or removed if anything ends the merge early."""
    parent = out.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f"{out.name}.partial-", dir=parent))
    except OSError as error:
        raise Gemma4CompatError(f"{str(parent)!r} cannot be written: {error.strerror or error}") from error
    try:
        with _terminable():
            yield staging
            staging.chmod(0o777 & ~_umask())
            try:
                if out.is_dir():
                    out.rmdir()  # empty, or this raises
                staging.rename(out)
            except OSError as error:
                raise Gemma4CompatError(f"{str(out)!r} cannot be written: {error.strerror or error}") from error
    except BaseException:
        shutil.rmtree(staging)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Inside, SIGTERM raises ``SystemExit``, unless the program has a handler of its own."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def stop(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def refuse_without_room(staging: Path, nbytes: int) -> None:
    """Raise ``Gemma4CompatError`` if the disk has less than ``nbytes`` free."""
    free = shutil.disk_usage(staging).free
    if free < nbytes:
        raise Gemma4CompatError(
            f"{str(staging.parent)!r} has {free} bytes free and the merged model needs {nbytes}. Free some space, or "
            "merge to another disk"
        )


def copy_other_files(base: Path, staging: Path) -> None:
    """Copy every other file that belongs to the model: tokenizer, processor, templates, licence."""
    for file in sorted(base.iterdir()):
        name = file.name
        if name in _REPLACED or name.endswith(_WEIGHTS) or name.startswith("."):
            continue
        target = staging / name
        try:
            if file.is_file():
                shutil.copyfile(file, target)
            elif name == "additional_chat_templates":
                shutil.copytree(file, target)
        except OSError as error:
            raise shards.unwritable(error, target, file.stat().st_size) from error


def write_config(base: Path, staging: Path, dtype: str, untied: bool) -> None:
    """Write the base's config.json with the new dtype, without its quantization, and untied if ``untied``."""
    data = json_files.settings(base / "config.json")
    data.pop("quantization_config", None)
    parts = [data, *(part for name, part in data.items() if name.endswith("_config") and isinstance(part, dict))]
    for part in parts:
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = dtype
        if untied and (part is data or "vocab_size" in part):
            part["tie_word_embeddings"] = False
    if not {"dtype", "torch_dtype"} & set(data):
        data["dtype"] = dtype
    shards.write_text(staging / "config.json", json.dumps(data, indent=2) + "\n")
