"""Errors and symptoms for which a patch is not enough: too little memory, an old release, other software.

They are data, ``common_errors.json``: the first that fits is taken. Each has ``what`` it is and what is ``to_do``, in
which ``{model}`` and ``{variant}`` stand for what the text names, and may have:

* ``more``: a page or an address; ``patches``: those that repair it in the patched libraries.
* of ``errors``: ``kinds``, the class; ``text``, found in the message; ``file``, found in a path of the traceback, all
  regular expressions; ``alone``: nobody else's, so that no patch is looked for; ``last``: after all others.
* of ``symptoms``: ``words``, expressions that all occur in a text without an error; none of ``other_matters`` does.
* of ``programs``: ``folders`` of software that raises errors of its own, the ``package`` to update, and ``marks``, by
  which an error without a traceback is known.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from gemma4_compat._doctor.explain.messages import Said
from gemma4_compat._engine.io import address

#: Variants that ``plan`` knows by name.
_VARIANT = re.compile(r"E2B|E4B|12B|26B-A4B|31B", re.IGNORECASE)
#: How classes of errors are called. Others, and no class, may be subclasses of any.
_ERROR = re.compile(r"Error$|Exception$|Warning$")
#: The longest description of a symptom, in characters. A longer text without an error is a log.
_DESCRIPTION = 500
#: Nothing of a patch has run then, whatever the traceback goes through.
_IMPORTS = frozenset({"no torchvision", "other torch", "no import"})
#: What is patched, and what that calls: an error that leaves the latter is the caller's.
PATCHED = ("transformers", "accelerate", "peft", "bitsandbytes", "gemma4_compat")
CALLED = sys.stdlib_module_names.union(
    ("torch", "torchvision", "torchao", "triton", "numpy", "PIL", "safetensors", "tokenizers", "huggingface_hub"),
    ("jinja2", "packaging", "requests", "httpx", "urllib3", "psutil", "wrapt", "IPython", "ipykernel"),
)
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/")


class Advice(NamedTuple):
    """What an error is, and what to do about it, each in a sentence or two; the other fields as in the table.

    ``symptom``: it was told in words.
    """

    what: str
    to_do: str
    more: str = ""
    patches: tuple[str, ...] = ()
    alone: bool = False
    name: str = ""
    symptom: bool = False

    @property
    def of_an_import(self) -> bool:
        """Whether a library could not be imported."""
        return self.name in _IMPORTS


@functools.cache
def table() -> Mapping[str, Any]:
    """The file, with how to install this package filled in."""
    text = resources.files(__package__).joinpath("common_errors.json").read_text(encoding="utf-8")
    for extra in address.EXTRAS:
        text = text.replace(f"{{{extra}}}", json.dumps(f"`{address.install(extra)}`")[1:-1])
    found: dict[str, Any] = json.loads(text)
    return found


def advice(said: Said) -> Advice | None:
    """What to do about the last error that is a common one, or a symptom in a text without errors; None: neither."""
    found, program = next(_errors(said), None) or next(_symptoms(said), None), raised_by(said)
    if found is None:
        program = program or _marked(said)
        return None if program is None else _of_program(program)
    names = {"{model}": said.model or "MODEL", "{variant}": _variant(said.model)}
    to_do = re.sub(r"{(?:model|variant)}", lambda match: names[match[0]], found["to_do"])
    fields = {name: found[name] for name in ("what", "more", "alone", "name") if name in found}
    known = Advice(to_do=to_do, patches=tuple(found.get("patches", ())), symptom="words" in found, **fields)
    if program is None or known.alone:
        return known
    other = _of_program(program)
    return known._replace(what=f"{known.what} {other.what}", to_do=f"{known.to_do} {other.to_do}")


def _errors(said: Said) -> Iterator[dict[str, Any]]:
    for last in (False, True):
        for message in said.messages:
            for one in table()["errors"]:
                kinds, file = one.get("kinds", ""), one.get("file", "")
                kind = not kinds or not _ERROR.search(message.kind) or re.fullmatch(kinds, message.kind)
                there = not file or any(re.search(file, frame.file) for frame in said.frames)
                if one.get("last", False) == last and kind and there and re.search(one.get("text", ""), message.text):
                    yield one


def _symptoms(said: Said) -> Iterator[dict[str, Any]]:
    if is_a_description(said):
        text = said.messages[0].text
        both = (text, text.replace("_", " "))  # save_pretrained_merged
        if re.search(table()["other_matters"], text, re.IGNORECASE):
            return
        for one in table()["symptoms"]:
            if all(any(re.search(words, each, re.IGNORECASE) for each in both) for words in one["words"]):
                yield one


def is_a_description(said: Said) -> bool:
    """Whether a text says in words what is wrong."""
    only = len(said.messages) == 1 and not said.messages[0].kind and not said.frames
    return only and len(said.messages[0].text) <= _DESCRIPTION


def raised_by(said: Said) -> dict[str, Any] | None:
    """The other software in whose code a traceback ends, as in the table; None if it does not."""
    for frame in reversed(said.frames):
        installed = _INSTALLED.match(frame.file)
        folders = list(PurePosixPath(frame.file[installed.end() :] if installed else frame.file).parent.parts)
        # Elsewhere, a checkout has folders in its own; a user's script may be in a folder of any name.
        inside = folders[:1] if installed else [name for name in folders if name in folders[:-1] or "_" in name]
        if not CALLED.isdisjoint(inside[:1]) or (not installed and "/lib/python3" in frame.file):
            continue
        programs = table()["programs"]
        known = next((one for one in programs for name in inside if re.fullmatch(one["folders"], name)), None)
        if known is not None or not installed or not inside or inside[0] in PATCHED:
            return known
        return {"name": inside[0], "package": inside[0]}
    return None


def _marked(said: Said) -> dict[str, Any] | None:
    """The program that an error without a traceback names."""
    last = said.messages[0].text if said.messages and not said.frames else ""
    if not last or not (said.messages[0].kind or re.search(r"error|fail", last, re.IGNORECASE)):
        return None
    known = (one for one in table()["programs"] if "marks" in one)
    return next((one for one in known if re.search(one["marks"], last, re.IGNORECASE)), None)


def _of_program(one: dict[str, Any]) -> Advice:
    update = f"Update it first: `pip install -U {one['package']}`. If it stays, its tracker is the place."
    what = f"{one['name']} raises this, in code that gemma4_compat does not change."
    return Advice(what, " ".join(filter(None, (update, one.get("to_do")))), one.get("more", ""))


def _variant(model: str) -> str:
    found = _VARIANT.search(model)
    return found[0].upper() if found else "MODEL"
