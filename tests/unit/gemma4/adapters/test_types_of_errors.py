"""S9: what a program catches without the package, it catches with it: bad adapters through each loader, off and on."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def _configured(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        (folder / CONFIG).write_text(json.dumps({**config, **settings}), encoding="utf-8")

    return change


def _weighted(of: Callable[[str, Any], tuple[str, Any]]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / WEIGHTS)
        save_file(dict(of(name, value) for name, value in weights.items()), folder / WEIGHTS)

    return change


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"x" * 10)


def _as_folder(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def _written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: _write(folder / name, content)


def _write(file: Path, content: bytes) -> None:
    file.write_bytes(content)


FOLDERS: dict[str, Callable[[Path], None]] = {
    "no configuration": lambda folder: (folder / CONFIG).unlink(),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "broken JSON": _written(CONFIG, b'{"peft_type": '),
    "empty JSON": _written(CONFIG, b""),
    "a list": _written(CONFIG, b"[]"),
    "no settings": _written(CONFIG, b"{}"),
    "unknown type": _configured(peft_type="NOPE"),
    "rank 0": _configured(r=0),
    "a rank of letters": _configured(r="four"),
    "no targets": _configured(target_modules=None),
    "foreign targets": _configured(target_modules=["c_attn"]),
    "bad pattern": _configured(target_modules="("),
    "truncated": lambda folder: _write(folder / WEIGHTS, (folder / WEIGHTS).read_bytes()[:-100]),
    "empty weights": _written(WEIGHTS, b""),
    "garbage": _written(WEIGHTS, b"garbage!" * 100),
    "wrong shapes": _weighted(lambda name, value: (name, value[:3, :3].clone())),
    "one dimension": _weighted(lambda name, value: (name, value.flatten().clone())),
    "other numbers": _weighted(lambda name, value: (name, value.double())),
    "broken pickle": _pickled,
    "weights are a folder": _as_folder(WEIGHTS),
    "configuration is a folder": _as_folder(CONFIG),
}
NAMES: dict[str, Any] = {
    "missing": Path("/no/such/folder"),
    "missing, relative": "./no-such-folder",
    "deep": "a/b/c/d",
    "a name of the hub": "someone/something",
    "one word": "nosuchname",
    "spaces": "bad name here",
    "empty": "",
    "none": None,
    "a number": 5,
}
LOADERS: dict[str, Callable[[Any, Any], Any]] = {
    "PeftModel.from_pretrained": lambda base, source: _peft().PeftModel.from_pretrained(base, source),
    "PeftMixedModel.from_pretrained": lambda base, source: _peft().PeftMixedModel.from_pretrained(base, source),
    "model.load_adapter": lambda base, source: base.load_adapter(source),
}


def _peft() -> Any:
    import peft

    return peft


def sources(workspace: Any, folder: Path) -> dict[str, Any]:
    """Each source, a folder as a path and as text; under the loaders, names of nothing as they are."""
    found = dict(NAMES)
    (folder / "nothing").mkdir()
    found["an empty folder"] = folder / "nothing"
    for number, (name, change) in enumerate(FOLDERS.items()):
        made = Path(shutil.copytree(workspace.adapter("language"), folder / f"bad-{number}"))
        change(made)
        found[name] = made
        found[f"{name}, as text"] = str(made)
    found["a file"] = workspace.adapter("language") / CONFIG
    return found


def errors(workspace: Any, given: dict[str, Any], load: Callable[[Any, Any], Any]) -> dict[str, Exception | None]:
    found: dict[str, Exception | None] = {}
    base = workspace.load()
    names = [name for name, _ in base.named_modules()]
    for case, source in given.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(base, source)
            found[case] = None
        except Exception as error:  # noqa: BLE001  # its type is what is looked at
            found[case] = error.with_traceback(None)
        if [name for name, _ in base.named_modules()] != names:
            base = workspace.load()
    return found


@pytest.mark.parametrize("loader", list(LOADERS))
def test_an_error_is_caught_as_upstream_s(workspace: Any, tmp_path: Path, loader: str) -> None:
    given = sources(workspace, tmp_path)
    on = errors(workspace, given, LOADERS[loader])
    gemma4_compat.revert()
    try:
        off = errors(workspace, given, LOADERS[loader])
    finally:
        gemma4_compat.install()
    assert on.keys() == off.keys()
    assert sum(error is not None for error in off.values()) > 20
    other = {
        case: f"{type(off[case]).__name__} without the package, {type(on[case]).__name__} with it: {on[case]}"
        for case in given
        if off[case] is not None and on[case] is not None and not isinstance(on[case], type(off[case]))
    }
    assert other == {}
    raised = {case: str(on[case]) for case in given if off[case] is None and on[case] is not None}
    assert raised == {}


def test_a_folder_without_weights_is_said_in_one_error(workspace: Any, tmp_path: Path) -> None:
    folder = sources(workspace, tmp_path)["no weights"]
    for kind in (Gemma4CompatError, ValueError, OSError):
        with pytest.raises(kind, match=r"has an adapter_config\.json but no weights"):
            _peft().PeftModel.from_pretrained(workspace.load(), folder)
