"""Inputs that made a reader take gigabytes, minutes or a traceback, each read in a process of its own with limits.

``python -m tests.unit.engine.common.hostile`` reads them all and prints a line of JSON for each. Imports no upstream
library.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._needed import judge

#: What one input may take: beside so much for every byte of it.
MEMORY, SECONDS = 64 << 20, 2.0
MEMORY_PER_BYTE, SECONDS_PER_MIB = 40, 2.0
#: Where the kernel ends a reader that takes more.
_ADDRESS_SPACE, _CPU, _WALL = 2 << 30, 10, 60

Read = Callable[[Path], Any]
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def needed(folder: Path, name: str, text: str | bytes, others: Mapping[str, str] | None = None) -> Read:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    for other, content in (others or {}).items():
        (folder / other).write_text(content)
    return lambda _: judge.assess(folder / name, gemma4_compat.patches())


def adapter(folder: Path, config: str | bytes | None = None, header: bytes | None = None) -> Read:
    text = json.dumps(LORA) if config is None else config
    (folder / "adapter_config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    head = b"{}" if header is None else header
    (folder / "adapter_model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    return lambda _: gemma4_compat.scan_adapter(folder)


def index(folder: Path, text: str | bytes) -> Read:
    (folder / "model.safetensors.index.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return lambda _: shards.checkpoint(folder)


def hole(file: Path, size: int) -> None:
    with file.open("wb") as stream:
        stream.truncate(size)


def _huge(name: str) -> Callable[[Path], Read]:
    def make(folder: Path) -> Read:
        read = index(folder, "{}") if name.startswith("model") else adapter(folder)
        hole(folder / name, 3 << 30)
        return read

    return make


def _link(name: str, to: str) -> Callable[[Path], Read]:
    def make(folder: Path) -> Read:
        read = needed(folder, name, "peft") if name.endswith("txt") else adapter(folder)
        (folder / name).unlink()
        (folder / name).symlink_to(to)
        return read

    return make


def _pipe(name: str) -> Callable[[Path], Read]:
    def make(folder: Path) -> Read:
        read = needed(folder, name, "peft") if name.endswith("txt") else adapter(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        return read

    return make


def _long_header(folder: Path, length: int) -> Read:
    read = adapter(folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b'{"a":' + b"[]," * 100)
    os.truncate(file, 8 + length)
    return read


def _entry(**changes: Any) -> bytes:
    return json.dumps({KEY: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | changes}).encode()


def _chain(count: int, times: int) -> dict[str, str]:
    files = {f"b{number}.txt": f"-r b{number + 1}.txt\n" * times for number in range(count)}
    return files | {f"b{count}.txt": "peft>=0.18\n"}


def _groups(count: int, times: int) -> str:
    lines = [
        f"g{n} = [{', '.join([f'{{include-group = {chr(39)}g{n + 1}{chr(39)}}}'] * times)}]" for n in range(count)
    ]
    return "\n".join(["[dependency-groups]", *lines, f"g{count} = ['peft>=0.18']"])


def _extras(count: int) -> str:
    """Extras that all state one release, which as many bounds as are read limit."""
    limits = ", ".join(f"'peft<{number}'" for number in range(1, 99))
    extras = "".join(f"e{number} = ['peft==0.19.1', 'torch']\n" for number in range(count))
    return f"[project.optional-dependencies]\n{extras}[tool.uv]\nconstraint-dependencies = [{limits}]"


def _toml(text: str) -> Callable[[Path], Read]:
    return lambda folder: needed(folder, "pyproject.toml", f"[project]\nname = 'x'\n{text}")


def _txt(text: str, **others: str) -> Callable[[Path], Read]:
    return lambda folder: needed(
        folder, "requirements.txt", text, {f"{key}.txt": value for key, value in others.items()}
    )


def _config(text: str | bytes) -> Callable[[Path], Read]:
    return lambda folder: adapter(folder, text)


def _header(text: bytes) -> Callable[[Path], Read]:
    return lambda folder: adapter(folder, header=text)


def _index(text: str | bytes) -> Callable[[Path], Read]:
    return lambda folder: index(folder, text)


#: Name -> (what makes it in a folder and returns its reader, what the one error says; None: it is read).
CASES: dict[str, tuple[Callable[[Path], Read], str | None]] = {
    "configuration of 3 GiB": (_huge("adapter_config.json"), "is read up to 8388608"),
    "configuration is a device": (_link("adapter_config.json", "/dev/zero"), "there is adapter_model.safetensors"),
    "configuration is a pipe": (_pipe("adapter_config.json"), "there is adapter_model.safetensors"),
    "configuration nested": (_config('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"), "nested deeper than 64"),
    "configuration nested less": (_config('{"a": ' + "[" * 900 + "]" * 900 + "}"), "nested deeper than 64"),
    "configuration of empty lists": (_config('{"peft_type": "LORA", "a": [' + "[]," * 2_000_000 + "[]]}"), None),
    "number of 5,000 digits": (_config('{"peft_type": "LORA", "r": ' + "1" * 5000 + "}"), "a number of 5000 digits"),
    "lone surrogate": (_config('{"peft_type": "LORA", "base_model_name_or_path": "\\ud800"}'), "half a character"),
    "lone surrogate in a name": (_config('{"peft_type": "LORA", "\\udfff": 1}'), "half a character"),
    "not UTF-8": (_config(b'{"peft_type": "LORA\xff"}'), "is not UTF-8"),
    "pattern that backtracks": (
        lambda folder: adapter(
            folder,
            json.dumps(LORA | {"rank_pattern": {"(a+)+$": 8}}),
            _entry().replace(b"q_proj", b"a" * 60 + b"b").replace(b'"shape": [0]', b'"shape": [0, 4]'),
        ),
        "the pattern '(a+)+$' in",
    ),
    "targets that backtrack": (
        lambda folder: adapter(folder, json.dumps(LORA | {"target_modules": "(.+)+x"}), _entry()),
        "the pattern '(.+)+x' in",
    ),
    "pattern nested": (
        _config(json.dumps(LORA | {"rank_pattern": {"(" * 4000 + ")" * 4000: 8}})),
        "is not a valid regular",
    ),
    "header nested": (_header(b'{"a": ' + b"[" * 100_000), "its header cannot be read"),
    "header nested in what is skipped": (_header(b'{"a": {"b": ' + b"[" * 100_000), "nested too deeply"),
    "header of 100 MB": (
        lambda folder: _long_header(folder, 99_000_000),
        "at most 16777216 are supported",
    ),
    "header of empty entries": (
        lambda folder: adapter(folder, header=b"{" + b",".join(b'"%d":{}' % n for n in range(700_000)) + b"}"),
        "it has no dtype",
    ),
    "header with a long name": (_header(b'{"' + b"a." * 500_000 + b'": {}}'), "length <= 1000"),
    "shape that multiplies": (_header(_entry(shape=[2**62] * 2000)), "length <= 64"),
    "shape of 5,000 digits": (_header(_entry().replace(b"[0]", b"[" + b"9" * 5000 + b"]")), "out of range"),
    "index of 3 GiB": (_huge("model.safetensors.index.json"), "is read up to 16777216"),
    "index nested": (_index("[" * 100_000), "is not an index of shards"),
    "index of numbers": (_index('{"weight_map": {"a": 1.5}}'), "expected str, got float"),
    "index of lists": (_index('{"weight_map": [' + "[]," * 3_000_000 + "[]]}"), "expected object, got array"),
    "index with a long name": (_index(json.dumps({"weight_map": {"a": "b" * 300}})), "length <= 255"),
    "index with a null character": (_index(json.dumps({"weight_map": {"a": "b\0"}})), "embedded null"),
    "blanks": (_txt("peft" + " " * 200_000 + ">=1"), "and at most 10000 are read"),
    "blanks before a comment": (_txt(" " * 400_000 + "x"), None),
    "doubled -r": (_txt("-r b0.txt\n" * 2, **{name[:-4]: text for name, text in _chain(40, 2).items()}), None),
    "chain of -r": (_txt("-r b0.txt", **{name[:-4]: text for name, text in _chain(1500, 1).items()}), "50 inside"),
    "-r /dev/zero": (_txt("-r /dev/zero"), "is a device or a pipe"),
    "-r of a long name": (_txt("-r " + "a" * 5000), "File name too long"),
    "-r with a null character": (_txt("-r a\0b"), "embedded null"),
    "link to itself": (_link("requirements.txt", "requirements.txt"), "cannot be read"),
    "pipe": (_pipe("requirements.txt"), "is a device or a pipe"),
    "many variables": (_txt("${PATH}" * 70_000), "more than 50 variables"),
    "many bounds": (_txt("\n".join(f"peft!=0.{n}" for n in range(4000))), "at most 100 are judged"),
    "version of 5,000 digits": (_txt("peft==" + "1" * 5000), "a version has 5000 characters"),
    "wheel of 5,000 digits": (_txt("./peft-" + "1" * 5000 + "-py3-none-any.whl"), None),
    "marker in parentheses": (_txt("peft ; " + "(" * 4500 + "'a'=='a'" + ")" * 4500), "is not a requirement"),
    "URL with signs": (_txt(("https://x/" + "@[" * 4900 + "\n") * 100), None),
    "group includes doubled": (lambda folder: needed(folder, "pyproject.toml", _groups(40, 2)), None),
    "extras that state the same": (_toml(_extras(20_000)), None),
    "many groups": (
        _toml("[dependency-groups]\n" + "".join(f"g{n} = ['peft==0.19.1']\n" for n in range(20_000))),
        None,
    ),
    "chain of groups": (
        lambda folder: needed(folder, "pyproject.toml", _groups(3000, 1)),
        "dependency groups include",
    ),
    "dotted key": (_toml("a" + ".a" * 20_000 + " = 1"), "a key or a value of 20000 dots"),
    "dotted key with quotes": (_toml("a" + '."a"' * 20_000 + " = 1"), "a key or a value of 21 dots"),
    "dotted key after a string": (_toml('x = {a = """b"""", a' + ".a" * 20_000 + " = 1}"), "20000 dots"),
    "tables": (_toml("".join(f"[a{n}.b.c.d]\n" for n in range(150_000))), "more than 200000 lines and dots"),
    "TOML nested": (_toml("a = " + "[" * 100_000), "nested too deeply"),
    "inline tables nested": (_toml("a = " + "{a = " * 100_000), "nested too deeply"),
    "TOML number of 5,000 digits": (_toml("a = " + "1" * 5000), "a key or a value of 5001 characters"),
    "many releases": (
        lambda folder: needed(
            folder,
            "uv.lock",
            "version = 1\n" + "".join(f"[[package]]\nname = 'peft'\nversion = '0.{n}'\n" for n in range(20_000)),
        ),
        "locks more than 50 releases of peft",
    ),
}


def bytes_in(folder: Path) -> int:
    """What a reader may read of a folder; nothing is larger than a safetensors header may be."""
    sizes = (file.lstat().st_size for file in folder.iterdir())
    return sum(min(size, 16 << 20) for size in sizes)


def outcome(name: str, folder: Path) -> dict[str, Any]:
    """How reading that input ends, in a child; nothing it takes is left."""
    make, _ = CASES[name]
    read = make(folder)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, json.dumps(_in_child(read, folder)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    _, status, usage = os.wait4(child, 0)
    found = json.loads(said) if said else {"end": f"killed by signal {os.waitstatus_to_exitcode(status)}", "said": ""}
    return found | {"name": name, "seconds": usage.ru_utime + usage.ru_stime, "bytes": bytes_in(folder)}


def _in_child(read: Read, folder: Path) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU, _CPU))
    signal.alarm(_WALL)  # a reader that waits for ever takes no CPU time
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read(folder)
        end, said = "read", ""
    except Gemma4CompatError as error:
        end, said = "error", str(error)
    except BaseException as error:  # noqa: BLE001 -- whatever else it is, is what the test is about
        end, said = type(error).__name__, "".join(traceback.format_exception_only(type(error), error))[:300]
    return {"end": end, "said": said, "memory": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10}


def outcomes() -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:  # what is imported first is not what an input takes
        with contextlib.suppress(Gemma4CompatError):
            adapter(Path(folder), header=_entry())(Path(folder))
        with contextlib.suppress(Gemma4CompatError):
            needed(Path(folder), "pyproject.toml", "[project]")(Path(folder))
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            yield outcome(name, Path(folder))


if __name__ == "__main__":
    for found in outcomes():
        print(json.dumps(found), flush=True)
