"""A fingerprint of a function's code that ignores comments, docstrings, annotations and layout.

It is taken from the syntax tree, not from byte code, so it is the same on every Python version. A patch lists the
fingerprints it was proven on, and code it has never seen is never replaced.

An ``__init__`` that a dataclass generated has no source: the fingerprint is that of the class and its bases. What
instances read under a name (a target with ``attribute``) has the fingerprint of the value in its class.

A fingerprint covers one function. It cannot notice a change in functions that this one calls; the reproductions, which
``doctor`` runs, can. Around the function are upstream's decorators, which the fingerprint covers, or wrappers of other
libraries, which :func:`stranger` finds.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import sys
import textwrap
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine import versions

# Absent from the tree of some Python versions, or without meaning at run time.
_IGNORED_FIELDS = frozenset({"annotation", "returns", "type_params", "type_comment", "kind", "ctx"})

# ``torch.compile`` and ``torch.compiler.disable`` run the function that they were given.
_TRANSPARENT = "torch._dynamo"

#: Packages whose functions are not another library's: those that are patched, and what these take functions from.
_NO_LIBRARY = frozenset(
    {*versions.OLDEST, "torch", "huggingface_hub", "__main__", "functools", "contextlib", "wrapt", "gemma4_compat"}
)

#: On the function that reads an attribute of instances: a tuple with the value in the class.
VALUE = "__gemma4_compat_value__"

# Finding and parsing a function's source takes most of the time of a decision, and decisions are repeated.
_known: dict[int, tuple[weakref.ref[types.CodeType], str]] = {}


def fingerprint(function: Any) -> str:
    """Twelve hexadecimal digits for the source of ``function`` (or of what it wraps).

    Raises:
        OSError: the source is not available.
        TypeError: not a Python function.
    """
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    elif isinstance(function, property):
        function = function.fget
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is not None and VALUE in vars(inner):
        (value,) = vars(inner)[VALUE]
        return fingerprint_source(repr(value) if isinstance(value, (bool, int, str, type(None))) else "absent")
    if code is None:
        return fingerprint_source(inspect.getsource(function))
    key = id(code)  # equal code may have another source
    if key not in _known or _known[key][0]() is not code:
        found = fingerprint_source(_source(inner))
        _known[key] = weakref.ref(code, lambda _: _known.pop(key, None)), found
    return _known[key][1]


def _source(function: Any) -> str:
    if function.__code__.co_filename != "<string>":
        return inspect.getsource(function)
    owner, _, name = function.__qualname__.rpartition(".")
    made_for = function.__globals__.get(owner)
    if name != "__init__" or not isinstance(made_for, type) or not dataclasses.is_dataclass(made_for):
        return inspect.getsource(function)  # raises: there is no source
    kinds = [kind for kind in made_for.__mro__ if dataclasses.is_dataclass(kind)]
    return "\n".join(textwrap.dedent(inspect.getsource(kind)) for kind in kinds)


def stranger(function: Any, ours: Callable[[Any], bool]) -> str | None:
    """The outermost wrapper that is not upstream's own, as "module.name"; None if there is no such wrapper.

    Upstream's wrappers are made in the function's own library, or by one of the decorators in its source.

    Args:
        function: the function under a name, with ``__wrapped__`` on every wrapper.
        ours: whether a patch has installed a wrapper.
    """
    layers: list[Any] = []
    inspect.unwrap(function, stop=lambda layer: layers.append(layer))
    inner = inspect.unwrap(function)
    home = _package(inner)
    decorators: Counter[str] | None = None
    for layer in layers:
        if ours(layer) or _package(layer) == home or _module(layer).startswith(_TRANSPARENT):
            continue
        if decorators is None:
            decorators = _decorators(inner)
        if not decorators[_package(layer)]:
            name = layer.__code__.co_name if type(layer) is types.FunctionType else type(layer).__name__
            return f"{_module(layer)}.{name}"
        decorators[_package(layer)] -= 1
    return None


def foreign(function: Any, home: str, ours: Callable[[Any], bool]) -> str | None:
    """What another library than ``home`` has put in the place of its function, or around it, as "module.name".

    None if all that is there is upstream's, this package's or the program's own.
    """
    layers: list[Any] = []
    layers.append(inspect.unwrap(function, stop=lambda layer: layers.append(layer)))
    for layer in layers:
        known = type(layer) is types.FunctionType and _package(layer) not in (home, *_NO_LIBRARY)
        if known and not ours(layer):
            return f"{_module(layer)}.{layer.__code__.co_name}"
    return None


def library(name: str) -> str:
    """The library of "module.name": its package, or the imported one whose name its package's begins with.

    Empty if that is no other library, or is not imported under that name.
    """
    package = name.partition(".")[0]
    if package in _NO_LIBRARY or package not in sys.modules:
        return ""
    parts = package.split("_")
    return next((one for end in range(1, len(parts)) if (one := "_".join(parts[:end])) in sys.modules), package)


def _module(layer: Any) -> str:
    """The module that defines a wrapper; ``functools.wraps`` gave it the ``__module__`` of what it wraps."""
    if type(layer) is types.FunctionType:  # a proxy, such as wrapt's, says that it is one
        return str(layer.__globals__.get("__name__"))
    return type(layer).__module__


def _package(layer: Any) -> str:
    return _module(layer).partition(".")[0]


def _decorators(function: types.FunctionType) -> Counter[str]:
    """The packages that the decorators in a function's source come from."""
    found: Counter[str] = Counter()
    definition = _parsed(inspect.getsource(function)).body[0]
    for decorator in getattr(definition, "decorator_list", ()):
        root = next((node.id for node in ast.walk(decorator) if isinstance(node, ast.Name)), "")
        held = function.__globals__.get(root)
        named = held.__name__ if isinstance(held, types.ModuleType) else getattr(held, "__module__", None)
        found[str(named).partition(".")[0]] += 1
    return found


def fingerprint_source(source: str) -> str:
    """The fingerprint of source text that holds one function definition."""
    return hashlib.sha256("\n".join(_walk(_parsed(source))).encode()).hexdigest()[:12]


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(textwrap.dedent(source))
    except IndentationError:  # a comment or a docstring's line at the margin kept it from being dedented
        (block,) = ast.parse(f"if True:\n{source}").body
        assert isinstance(block, ast.If)
        return ast.Module(body=block.body, type_ignores=[])


def _walk(node: ast.AST) -> Iterator[str]:
    yield type(node).__name__
    for name, value in ast.iter_fields(node):
        if name in _IGNORED_FIELDS or value is None or value == []:
            continue
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            value = _without_docstring(value)
        if name == "values" and isinstance(node, ast.JoinedStr):
            value = _joined(value)
        yield f".{name}"
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _walk(item)
            else:
                yield repr(item)
    yield ")"


def _joined(values: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string, neighbouring texts joined and empty ones dropped: releases of Python 3.12 differ."""
    parts: list[ast.expr] = []
    for value in values:
        if isinstance(value, ast.Constant) and value.value == "":
            continue
        if isinstance(value, ast.Constant) and parts and isinstance(parts[-1], ast.Constant):
            parts[-1] = ast.Constant(parts[-1].value + value.value)  # type: ignore[operator]  # both are text
        else:
            parts.append(value)
    return parts


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
