"""Same code, same fingerprint, however it is written; other code, another one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._engine.fingerprint import fingerprint, fingerprint_source
from tests.helpers import MARK, Library, fingerprint_in, foreign, installed

CODE = '''
class Layer:
    def forward(self, x, *names, scale=1.0, mode="fast"):
        """What it does."""
        total = x * scale + 1  # why
        if mode in ("fast", 'slow'):
            return f"{total}", [name for name in names]
        raise ValueError("no mode")
'''
NAME = "Layer.forward"

SAME = {
    "comment": ("# why", "# because, and at length"),
    "comment removed": ("  # why", ""),
    "comment at the margin": ("        if mode", "# if old_mode:\n        if mode"),
    "docstring": ("What it does.", "Something else."),
    "docstring removed": ('        """What it does."""\n', ""),
    "docstring of many lines": ("What it does.", "What.\n\n        More.\n        "),
    "docstring at the margin": ("What it does.", "What.\n\nMore\n"),
    "blank lines": ("        if mode", "\n\n        if mode"),
    "annotations": (
        "(self, x, *names, scale=1.0, mode=",
        "(self, x: int, *names: str, scale: float = 1.0, mode: 'str' =",
    ),
    "return annotation": ('mode="fast"):', 'mode="fast") -> tuple[str, list]:'),
    "quotes": ("'slow'", '"slow"'),
    "triple quotes": ('"no mode"', '"""no mode"""'),
    "u prefix": ('"no mode"', 'u"no mode"'),
    "parentheses": ("x * scale + 1", "(x * scale) + 1"),
    "line breaks": ("x * scale + 1", "(\n            x * scale\n            + 1\n        )"),
    "trailing comma": ("(\"fast\", 'slow')", "(\"fast\", 'slow',)"),
    "its place in the file": ("\nclass", "\nimport os\n\n\nclass"),
}

DIFFERENT = {
    "constant": ("+ 1", "+ 2"),
    "type of a constant": ("+ 1", "+ 1.0"),
    "operator": ("x * scale", "x / scale"),
    "comparison": ("mode in", "mode not in"),
    "default": ("scale=1.0", "scale=2.0"),
    "default removed": ("scale=1.0", "scale"),
    "name of an argument": ("self, x,", "self, x, y,"),
    "kind of an argument": ("x, *names", "x, names, *"),
    "string": ("'slow'", "'slower'"),
    "f-string": ('f"{total}"', 'f"{total!r}"'),
    "string that is no docstring": ("  # why", '\n        "kept" + mode'),
    "statement": ("        if mode", "        x = 0\n        if mode"),
    "order": ("x * scale", "scale * x"),
    "called name": ("ValueError", "TypeError"),
    "decorator": ("    def forward", "    @staticmethod\n    def forward"),
    "async": ("def forward", "async def forward"),
    "annotated assignment without a value": ("total = x * scale + 1", "total: int"),
}


def changed(change: tuple[str, str]) -> str:
    assert CODE.count(change[0]) == 1, "the change must hit one place"
    return CODE.replace(*change)


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_the_same_code_written_differently_has_the_same_fingerprint(
    create: Callable[..., Library], change: tuple[str, str]
) -> None:
    first, second = create(core=CODE), create(core=changed(change))
    assert fingerprint(first.load().Layer.forward) == fingerprint(second.load().Layer.forward)


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT)
def test_other_code_has_another_fingerprint(change: tuple[str, str]) -> None:
    assert fingerprint_in(CODE, NAME) != fingerprint_in(changed(change), NAME)


def test_it_is_twelve_hexadecimal_digits_and_for_ever_the_same() -> None:
    assert fingerprint_in("def double(x):\n    return x * 2\n", "double") == "123783a6dd70"


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, property, foreign])
def test_wrappers_have_the_fingerprint_of_what_they_wrap(
    create: Callable[..., Library], wrap: Callable[..., Any]
) -> None:
    forward = create(core=CODE).load().Layer.forward
    assert fingerprint(wrap(forward)) == fingerprint(forward) == fingerprint_in(CODE, NAME)


def test_our_own_replacement_has_the_fingerprint_of_the_original(library: Library) -> None:
    core = library.load()
    before = fingerprint(core.double)
    installed(library.patch())
    assert MARK in vars(core.double)
    assert fingerprint(core.double) == before


def test_decorated_and_nested_definitions_are_read_whole(create: Callable[..., Library]) -> None:
    core = textwrap.dedent(
        """
        import functools


        class Outer:
            class Inner:
                @functools.wraps(print)
                def run(self):
                    def helper(x):
                        return x

                    return helper(1)
        """
    )
    inner = create(core=core).load().Outer.Inner
    inner.run.__dict__.pop("__wrapped__")
    assert fingerprint(inner.run) == fingerprint_in(core, "Outer.Inner.run")


GENERATED = """
import dataclasses


@dataclasses.dataclass(slots=True)
class Base:
    first: int = 1

    def __post_init__(self):
        self.first += 1


@dataclasses.dataclass(slots=True)
class Layer(Base):
    second: int = 2
"""


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("    first: int", "    # why\n    first: float", True),
        ("+= 1", "+= 2", False),
        ("int = 2", "int = 3", False),
        ("(slots=True)\nclass Layer", "\nclass Layer", False),
    ],
)
def test_what_a_dataclass_generates_has_the_fingerprint_of_the_classes(
    create: Callable[..., Library], before: str, after: str, same: bool
) -> None:
    assert GENERATED.count(before) == 1
    first = create(core=GENERATED).load().Layer
    second = create(core=GENERATED.replace(before, after)).load().Layer
    assert first.__init__.__code__.co_filename == "<string>"
    assert (fingerprint(first.__init__) == fingerprint(second.__init__)) is same


def test_what_else_is_generated_has_none() -> None:
    names: dict[str, Any] = {}
    code = compile("def f(): pass", "<string>", "exec")
    eval(code, names)
    with pytest.raises(OSError, match="source"):
        fingerprint(names["f"])


@pytest.mark.parametrize("value", [3, "text", None, len])
def test_what_has_no_python_source_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError):
        fingerprint(value)


def test_it_is_the_same_on_every_python_and_in_every_release_of_this_package() -> None:
    """Every patch holds fingerprints made by earlier releases: this one must never change."""
    source = '''
    @functools.wraps(f)
    async def sample(self, first, /, *rest: int, key=(1, 2.5), **more) -> "str":
        """Documentation."""
        # a comment
        text = f"{first!r:>{key[0]}} {'nested'}" "joined" r"raw"[0:1]
        with open(text) as file, file:
            return [x async for x in rest if (y := x) is not None] or {**more, "a": lambda z: -z}
    '''
    assert fingerprint_source(source) == "04d3e2c265ef"
