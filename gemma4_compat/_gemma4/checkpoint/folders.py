"""The folders of a merge or a repair: inputs are only read; the output appears complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gemma4_compat._engine.io import arguments, json_files, notice, temporary
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import shards

REPORT, REPORT_TEXT = "merge_report.json", "merge_report.txt"

#: Files of the base that are not copied.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_CONFIG = "config.json"
_REPLACED = (_CONFIG, "README.md", ".gitattributes", REPORT, REPORT_TEXT)
_TEMPLATES = "additional_chat_templates"

#: The folder's name while it is being written has this after the first bytes of its final name.
_PARTIAL = ".partial-"
_SHORTENED, _LONGEST_NAME = 200, 255

#: A name, or an owner and a name. "./models/E2B", "/models/E2B", "~/E2B" and "C:\\E2B" are none.
_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*", re.ASCII)


def may_be_id(text: str) -> bool:
    """Whether it may be a repository's id on the hub; all else is a path."""
    return _ID.fullmatch(text) is not None


def local(given: str | Path, what: str) -> Path:
    """The given folder, or the folder of a cached id; raises :class:`Gemma4CompatError` if there is neither."""
    folder = arguments.path(given, what)
    if os.path.isdir(folder):  # noqa: PTH112 - it is False for what can be no name, where Path raises
        return folder
    if os.path.exists(folder):  # noqa: PTH110 - likewise
        raise Gemma4CompatError(f"{str(given)!r} is a file; give the folder of the {what}")
    if not may_be_id(str(given)):
        raise Gemma4CompatError(
            f"the folder {str(given)!r} does not exist; give that of the {what}, or its id on the hub"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(given), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, FileNotFoundError) as error:
        raise Gemma4CompatError(
            f"the {what} {str(given)!r} is neither a folder nor in the cache of the hub; fetch it with: "
            f"hf download {given}"
        ) from error


def cached(repository: str, file: str) -> Path | None:
    """A file of a repository in the cache of the hub; None without one, or without the library."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError:
        return None
    try:
        found = try_to_load_from_cache(repository, file)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def output(given: str | Path, *inputs: Path, what: str = "merged model") -> Path:
    """The absolute path of the folder to be written; ``what`` is what will be in it.

    Raises:
        Gemma4CompatError: something already exists there, it is a link, or it is inside an input.
    """
    arguments.path(given, "output folder")
    text = os.fspath(given)
    if not text or "\0" in text:
        raise Gemma4CompatError(f"{text!r} is not a valid folder name; give a new folder for the result")
    out = Path(os.path.abspath(text))  # noqa: PTH100 - Path.absolute keeps "..", which then has no name
    if len(os.fsencode(out.name)) > _LONGEST_NAME:
        raise Gemma4CompatError(
            f"the name {out.name[:40]!r}... of the output folder is longer than {_LONGEST_NAME} bytes; shorten it"
        )
    if out.is_symlink():
        raise Gemma4CompatError(f"{text!r} is a link; give the folder itself, or the name of a new one")
    if os.path.isdir(out) and not os.listdir(out):  # noqa: PTH112, PTH208 - these never raise for a name
        if Path.cwd().is_relative_to(out):
            raise Gemma4CompatError(f"{text!r} is the working folder, which cannot be replaced; give a new folder")
    elif os.path.lexists(out):
        raise Gemma4CompatError(f"{text!r} exists; nothing is overwritten. Give a new folder, or remove that one")
    for folder in inputs:
        if out.resolve().is_relative_to(folder.resolve()):
            raise Gemma4CompatError(f"{text!r} is inside {str(folder)!r}, which is only read; give a folder beside it")
    return out


@contextlib.contextmanager
def staging(out: Path, what: str = "merge", leftovers: list[Path] | None = None) -> Iterator[Path]:
    """A folder beside ``out`` that is renamed to it at the end, or removed if anything ends it early.

    Args:
        out: the folder to be written.
        what: the command that writes it, for messages.
        leftovers: collects what killed runs to ``out`` left behind, for the caller to remove; if None, they are
            removed here.
    """
    _tidy(out, what, leftovers)
    made = [folder for folder in out.parents if not folder.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = temporary.Folder(out.parent, _prefix(out))
    except OSError as error:
        _unmake(made)
        raise Gemma4CompatError(f"{str(out.parent)!r} cannot be written: {error.strerror or error}") from error
    try:
        with temporary.terminable():
            yield folder.path
            folder.path.chmod(0o777 & ~_umask())
            try:
                if out.is_dir():
                    out.rmdir()  # empty, or this raises
                folder.release()
                folder.path.rename(out)
            except OSError as error:
                raise Gemma4CompatError(f"{str(out)!r} cannot be written: {error.strerror or error}") from error
    except BaseException:
        folder.remove()
        _unmake(made)
        raise


def _prefix(out: Path) -> str:
    return f"{os.fsdecode(os.fsencode(out.name)[:_SHORTENED])}{_PARTIAL}"


def _tidy(out: Path, what: str, leftovers: list[Path] | None) -> None:
    """Remove what a killed run to ``out`` left, report what others left, and refuse if another run is active."""
    left, used, unknown = temporary.leftovers(out.parent, _PARTIAL)
    for folder in used:
        if folder.name.startswith(_prefix(out)):
            raise Gemma4CompatError(
                f"another {what} is writing {str(out)!r} now, in {str(folder)!r}; wait for it, or give another folder"
            )
    for folder in left:
        if folder.name.startswith(_prefix(out)) and leftovers is not None:
            leftovers.append(folder)
        elif folder.name.startswith(_prefix(out)):
            temporary.remove(folder)
            _warn(f"an earlier {what} to {str(out)!r} was killed; its leftovers in {str(folder)!r} are removed")
        else:
            _warn(f"{str(folder)!r} was left by a killed {what}; nothing uses it, and it can be removed")
    for folder in unknown:
        if folder.name.startswith(_prefix(out)):
            _warn(f"{str(folder)!r} looks like the leftovers of a killed {what}; unless you need it, remove it")


def _warn(message: str) -> None:
    notice.warn_user(message)


def _unmake(folders: Sequence[Path]) -> None:
    """Remove folders that turned out not to be needed, the innermost first."""
    for folder in folders:
        with contextlib.suppress(OSError):  # somebody else has put something in it
            folder.rmdir()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def refuse_without_room(staging: Path, nbytes: int, what: str = "the merged model") -> None:
    """Raise ``Gemma4CompatError`` if the disk has less than the ``nbytes`` free that ``what`` needs."""
    free = shutil.disk_usage(staging).free
    if free < nbytes:
        raise Gemma4CompatError(
            f"{str(staging.parent)!r} has {free} bytes free and {what} needs {nbytes}. Free some space, or write "
            "to another disk"
        )


def other_files(base: Path, *, all_but_config: bool = False) -> list[Path]:
    """Every other file or folder that belongs to the model: tokenizer, processor, templates, licence.

    Args:
        base: the folder of the model.
        all_but_config: include files that a merge rewrites, such as the model card.
    """
    found = []
    for file in sorted(base.iterdir()):
        name = file.name
        if name in ((_CONFIG,) if all_but_config else _REPLACED) or name.endswith(_WEIGHTS) or name.startswith("."):
            continue
        if file.is_file() or (name == _TEMPLATES and file.is_dir()):
            found.append(file)
    return found


def nbytes(files: Iterable[Path]) -> int:
    """Bytes of files, and of those in folders."""
    return sum(nbytes(file.iterdir()) if file.is_dir() else file.stat().st_size for file in files)


def copy_files(files: Iterable[Path], staging: Path) -> None:
    """Copy files and folders into ``staging``."""
    for file in files:
        target = staging / file.name
        try:
            if file.is_dir():
                shutil.copytree(file, target)
            else:
                shutil.copyfile(file, target)
        except OSError as error:
            raise shards.unwritable(error, target, nbytes([file])) from error


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
