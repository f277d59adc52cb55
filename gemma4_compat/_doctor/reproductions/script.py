"""A reproduction as a standalone script that calls only the libraries, for a report to their maintainers.

The script consists of the source of a patch's ``reproduce`` and of the parts of this package's reproductions that it
uses. Unused definitions are left out, and imports of this package are replaced by what they would have imported.
Making the script runs none of this code.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gemma4_compat._engine.patch import Patch
from gemma4_compat._errors import Gemma4CompatError

_PACKAGE = "gemma4_compat"
#: Modules that reproductions may use. Anything else would be part of the fix.
_ALLOWED = re.compile(
    rf"{_PACKAGE}\.(_lab\.[\w.]+|_gemma4\.models\.(variants|shared_weights)|_engine\.(patch|versions)|_errors|patches\.api)"
)
_HEAD = '''\
"""{summary}

{symptom}

Made by `gemma4-compat reproduce {id}`: calls only the libraries, not gemma4_compat, on a tiny random checkpoint that
it builds in a temporary folder. Exit code 1: the defect is there; 0: it is not.
"""

from __future__ import annotations

'''
_FOOT = """

if __name__ == "__main__":
    import shutil as _shutil
    import tempfile as _tempfile
    import traceback as _traceback

    _folder = Path(_tempfile.mkdtemp(prefix="reproduce-"))
    try:
        _found = reproduce(Workspace.build(_folder / "workspace"))
    except MissingPartError as _error:
        _found = Outcome(False, str(_error), applicable=False)
    except Exception as _error:
        _traceback.print_exc()
        _found = Outcome.of_error(_error)
    finally:
        _shutil.rmtree(_folder, ignore_errors=True)
    print("DEFECT:" if _found.defect else "no defect:" if _found.applicable else "not applicable:", _found.detail)
    raise SystemExit(1 if _found.defect else 0)
"""


@dataclass
class _Module:
    """A module's source, and what its names refer to.

    Attributes:
        definitions: top-level name -> the statement that binds it.
        ours: top-level name -> (module, name) of this package; the name is "" for a module.
        others: top-level name -> the statement that imports it from elsewhere.
    """

    name: str
    lines: list[str]
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    ours: dict[str, tuple[str, str]] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    order: list[ast.stmt] = field(default_factory=list)


class _Collector:
    """Finds everything a definition uses, directly or indirectly."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.modules: dict[str, _Module] = {}  # a module comes after the modules it imports
        self.needed: dict[str, dict[str, None]] = {}  # module -> names of definitions
        self.members: dict[str, dict[str, dict[str, None]]] = {}  # used module -> alias -> attributes
        self.imports: dict[str, None] = {}

    def add(self, module_name: str, name: str) -> None:
        module = self.module(module_name)
        if name in module.definitions:
            if name not in self.needed.setdefault(module_name, {}):
                self.needed[module_name][name] = None
                self._follow(module, module.definitions[name])
        elif name in module.ours:
            self.add(*module.ours[name])
        elif name in module.others:
            self.imports[module.others[name]] = None

    def module(self, name: str) -> _Module:
        if name not in self.modules:
            if not _ALLOWED.fullmatch(name) and not name.startswith(f"{_PACKAGE}.patches."):
                raise Gemma4CompatError(
                    f"the reproduction of {self.patch.id} uses {name}, which is part of the fix, so no standalone "
                    f"script can be made; `gemma4-compat doctor {self.patch.id}` runs it"
                )
            found = _read(name)
            for statement in found.order:
                for imported, _ in _imports(statement):
                    if _ALLOWED.fullmatch(imported):
                        self.module(imported)
            self.modules[name] = found
        return self.modules[name]

    def _follow(self, module: _Module, definition: ast.stmt) -> None:
        ours = dict(module.ours)
        theirs = set()  # imported inside, whatever the module defines under that name
        for node in _nodes(definition):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (node.module or "").partition(".")[0] == _PACKAGE:
                        ours[alias.asname or alias.name] = _target(node.module or "", alias.name)
                    else:
                        theirs.add(alias.asname or alias.name)
        skipped = {id(inner) for node in _annotations(definition) for inner in ast.walk(node)}
        for node in _nodes(definition):
            if id(node) in skipped:
                if isinstance(node, ast.Name) and node.id in module.others:
                    self.imports[module.others[node.id]] = None
                continue
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                target = ours.get(node.value.id)
                if target is not None and not target[1]:
                    self.members.setdefault(target[0], {}).setdefault(node.value.id, {})[node.attr] = None
                    self.add(target[0], node.attr)
            elif isinstance(node, ast.Name):
                if node.id in ours:
                    if ours[node.id][1]:
                        self.add(*ours[node.id])
                elif node.id not in theirs:
                    self.add(module.name, node.id)


def script(patch: Patch) -> str:
    """The source of a script that shows the defect of ``patch``.

    Raises:
        Gemma4CompatError: there is no source, or the reproduction uses a part of the fix.
    """
    home = patch.reproduce.__module__
    collector = _Collector(patch)
    collector.module(home)
    for module, name in (
        (home, patch.reproduce.__name__),
        (f"{_PACKAGE}._lab.workspace", "Workspace"),
        (f"{_PACKAGE}._lab.workspace", "MissingPartError"),
        (f"{_PACKAGE}._engine.patch", "Outcome"),
    ):
        collector.add(module, name)
    _refuse_collisions(collector)
    ordered = sorted(collector.modules, key=lambda name: (name == home, list(collector.modules).index(name)))
    body = "".join(_part(collector, name) for name in ordered)
    imports = dict.fromkeys([*collector.imports, "from pathlib import Path", "from types import SimpleNamespace"])
    head = _HEAD.format(id=patch.id, summary=patch.summary, symptom=patch.symptom.replace('"""', "'''"))
    text = head + "\n".join(sorted(imports)) + "\n" + body + _FOOT
    ast.parse(text)
    return text


def report(patch: Patch, versions: Mapping[str, str]) -> str:
    """A report to upstream's maintainers, in Markdown."""
    parts = re.split(r"\n\n(Symptom|Cause|Fix|Remove when): ", "\n\n" + patch.documentation)
    named = dict(zip(parts[1::2], parts[2::2]))
    stack = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n\n".join(
        [
            f"### {patch.first_symptom.replace('``', '`')}",
            f"**What happens.** {patch.symptom.replace('``', '`')}",
            f"**Why.** {' '.join(named.get('Cause', '').split()).replace('``', '`')}",
            f"**Where.** {', '.join(f'`{target}`' for target in patch.targets)}; releases: "
            f"`{patch.distribution}{patch.affected}`, measured up to {patch.measured}. Seen with {stack}.",
            "**To reproduce.** The attached script builds a tiny random model and shows the defect (exit code 1). "
            "It downloads nothing and needs no GPU, unless the defect only occurs on one.",
        ]
    )


@functools.cache
def _read(name: str) -> _Module:
    spec = importlib.util.find_spec(name)
    try:
        source = Path(str(spec and spec.origin)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Gemma4CompatError(f"a script needs the source of {name}, which is missing: {error}") from error
    module = _Module(name, source.splitlines())
    for statement in ast.parse(source).body:
        module.order.append(statement)
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                bound = alias.asname or alias.name.partition(".")[0]
                if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(_PACKAGE):
                    module.ours[bound] = _target(statement.module or "", alias.name)
                elif not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
                    source_of = f"from {statement.module} " if isinstance(statement, ast.ImportFrom) else ""
                    renamed = f" as {alias.asname}" if alias.asname else ""
                    module.others[bound] = f"{source_of}import {alias.name}{renamed}"
        else:
            module.definitions.update(dict.fromkeys(_bound(statement), statement))
    return module


def _target(module: str, name: str) -> tuple[str, str]:
    """(module, name) of what ``from module import name`` binds; the name is "" if that is a module itself."""
    inner = f"{module}.{name}"
    if inner.count(".") < 4 and importlib.util.find_spec(module) is not None and _is_module(inner):
        return inner, ""
    return module, name


@functools.cache
def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not a package
        return False


def _imports(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(_PACKAGE):
        for alias in statement.names:
            yield _target(statement.module or "", alias.name)


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    nodes = (node for target in targets if target is not None for node in ast.walk(target))
    return [node.id for node in nodes if isinstance(node, ast.Name)]


@functools.cache
def _nodes(statement: ast.stmt) -> tuple[ast.AST, ...]:
    """All nodes of a statement of a module, which :func:`_read` keeps."""
    return tuple(ast.walk(statement))


def _annotations(definition: ast.stmt) -> Iterator[ast.expr]:
    for node in _nodes(definition):
        for name in ("annotation", "returns"):
            if (found := getattr(node, name, None)) is not None:
                yield found


def _refuse_collisions(collector: _Collector) -> None:
    owner: dict[str, str] = {}
    for module, names in collector.needed.items():
        aliases = collector.members.get(module, {})
        for name in [*names, *aliases]:
            if owner.setdefault(name, module) != module:
                raise Gemma4CompatError(
                    f"no script can be made from the reproduction of {collector.patch.id}: {name} is defined in "
                    f"{owner[name]} and in {module}"
                )


def _part(collector: _Collector, name: str) -> str:
    """The needed definitions of a module in their order, then aliases for code that uses it as a module."""
    module, needed = collector.modules[name], collector.needed.get(name, {})
    statements = [
        statement for statement in module.order if any(module.definitions.get(item) is statement for item in needed)
    ]
    text = "".join(f"\n\n{_source(module, statement)}\n" for statement in statements)
    for alias, members in collector.members.get(name, {}).items():
        listed = ", ".join(f"{member}={member}" for member in members)
        text += f"\n\n{alias} = SimpleNamespace({listed})\n"
    return text


def _source(module: _Module, statement: ast.stmt) -> str:
    """A statement as written, without its imports of this package."""
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
    dropped: dict[int, str] = {}
    for node in _nodes(statement):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE):
            renamed = [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname]
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                dropped[line] = ""
            dropped[node.lineno] = " " * node.col_offset + "; ".join(renamed) if renamed else ""
    kept = []
    for index in range(first, (statement.end_lineno or first) + 1):
        text = dropped.get(index, module.lines[index - 1])
        if index not in dropped or text:
            kept.append(text)
    return "\n".join(kept)
