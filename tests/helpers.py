"""Fake distributions, patches for them, and child processes that report JSON. Imports no upstream library."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import gemma4_compat
from gemma4_compat import Gemma4CompatWarning, Patch, patches
from gemma4_compat._engine import changes
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.fingerprint import fingerprint_source
from gemma4_compat._engine.patch import ActsOn, Kind, Severity, Target

ROOT = Path(__file__).resolve().parents[1]
#: Patches whose defects need a GPU: `detect` asks for one, and the matrix, which is one of CPUs, cannot show them.
ON_A_GPU = ("bitsandbytes-int8-strides", "transformers-offloaded-cache")
#: Patches of other libraries' weights, which no stack of the matrix installs: their own tests run where these are.
WITH_OTHER_LIBRARIES = ("accelerate-subclass-offload", "transformers-packed-layers")
MARK = changes._OURS

CORE = '''
def double(x, *, times=2):
    """Twice x."""
    return x * times


def triple(x):
    return x * 3


class Layer:
    def forward(self, x):
        return x + 1

    @staticmethod
    def scale(x):
        return x * 10

    @classmethod
    def make(cls):
        return cls()


class Special(Layer):
    pass


NUMBER = 3
'''

_numbers = itertools.count()


def tagged(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The usual replacement: what the original says, recognizable."""
    return "patched", original(*args, **kwargs)


def fingerprint_in(source: str, name: str) -> str:
    """The fingerprint of the function ``name`` (dotted) in the text of a module, without importing it."""
    node: Any = ast.parse(source)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return fingerprint_source(textwrap.dedent("\n".join(source.splitlines()[first - 1 : node.end_lineno])))


@dataclass
class Library:
    """A fake distribution: a package with ``__version__`` and modules, and a dist-info folder that names a version.

    Attributes:
        folder: what to put on sys.path.
        name: of the distribution and of its package.
        core: the text of its module ``core``, in which targets live unless told otherwise.
    """

    folder: Path
    name: str
    core: str = CORE

    @classmethod
    def create(
        cls,
        folder: Path,
        name: str | None = None,
        *,
        core: str = CORE,
        version: str = "1.0",
        installed: str | None = None,
        **modules: str,
    ) -> Library:
        """Write a library whose code says ``version`` and whose metadata says ``installed`` (default: the same).

        Without ``name`` it gets one that no other has in this process, for import hooks cannot be taken back.
        """
        library = cls(folder, name or f"fakelib{next(_numbers)}", core)
        library.write("__init__", f"__version__ = {version!r}\n")
        for module, text in {"core": core, **modules}.items():
            library.write(module, text)
        library.write_metadata(installed or version)
        return library

    def write(self, module: str, text: str) -> None:
        path = self.folder / self.name / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("LIBRARY", self.name), encoding="utf-8")
        importlib.invalidate_caches()

    def write_metadata(self, version: str) -> None:
        for old in self.folder.glob(f"{self.name}-*.dist-info/METADATA"):
            old.unlink()
            old.parent.rmdir()
        info = self.folder / f"{self.name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {version}\n")
        importlib.invalidate_caches()

    def load(self, module: str = "core") -> Any:
        return importlib.import_module(f"{self.name}.{module}")

    def target(
        self,
        name: str = "double",
        replacement: Callable[..., Any] = tagged,
        *,
        module: str = "core",
        source: str | None = None,
        proven_on: str | None = None,
        known: Mapping[str, str] | None = None,
        optional: bool = False,
        group: str = "",
    ) -> Target:
        """A target whose known code is ``proven_on`` (default: the same name) in ``source`` (default: the core)."""
        if known is None:
            known = {fingerprint_in(source or self.core, proven_on or name): "1.0"}
        return Target(
            module=f"{self.name}.{module}",
            name=name,
            replacement=replacement,
            known=known,
            optional=optional,
            group=group,
        )

    def patch(self, *targets: Target, id: str = "fakelib-double", **fields: Any) -> Patch:
        defaults: dict[str, Any] = {
            "summary": "double is right",
            "symptom": "silent: double is wrong",
            "kind": Kind.REPAIR,
            "severity": Severity.WRONG_RESULT,
            "acts_on": ActsOn.EVERY_MODEL,
            "failure_points": ("F0",),
            "distribution": self.name,
            "affected": ">=1",
            "measured": "1.0",
            "retire_when": "double is right",
            "reproduce": no_reproduction,
        }
        return Patch(id=id, targets=targets or (self.target(),), **(defaults | fields))


def gpu(major: int, minor: int, **properties: Any) -> Any:
    """What ``torch.cuda.get_device_properties`` returns for a GPU that is not there."""
    return types.SimpleNamespace(major=major, minor=minor, **properties)


def no_reproduction(_workspace: Any) -> Any:
    raise NotImplementedError("fake patches are not reproduced")


def installed(*patches: Patch) -> Engine:
    """An engine with these patches, armed."""
    engine = Engine(patches)
    engine.install()
    return engine


_REAL = frozenset(patch.id for patch in patches())


def raw(owner: Any, name: str) -> Any:
    """What the namespace of ``owner`` itself holds, no descriptor called; None when nothing (it is inherited)."""
    return vars(owner).get(name)


def is_ours(value: Any) -> bool:
    """Whether a raw slot holds a replacement. Only functions are looked into: a lazy object may import when asked."""
    if type(value) in (staticmethod, classmethod):
        value = value.__func__
    return type(value) is FunctionType and MARK in vars(value)


def traces(packages: Sequence[str] = ()) -> list[str]:
    """Every name in a loaded module, or in a class that a module of ``packages`` holds, bound to a replacement.

    Those of the package's own patches do not count: they may be on, where tests of the libraries share the process.
    """
    found = []
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        for name, value in list(vars(module).items()):
            if is_ours(value):
                if vars(value)[MARK] not in _REAL:
                    found.append(f"{module.__name__}.{name}")
            elif isinstance(value, type) and module.__name__.partition(".")[0] in packages:
                found += [
                    f"{module.__name__}.{name}.{key}" for key, slot in list(vars(value).items()) if is_ours(slot)
                ]
    return found


@contextlib.contextmanager
def without(patch_id: str) -> Iterator[None]:
    """Inside, this patch is off, the others are on."""
    gemma4_compat.revert(patch_id)
    try:
        yield
    finally:
        gemma4_compat.install()
        assert gemma4_compat.status()[patch_id].state is gemma4_compat.PatchState.APPLIED


def holders(references: Iterable[weakref.ref[Any]]) -> list[str]:
    """What is alive of these, each with who holds it: [] once all are gone.

    A turn of the collector is not always enough: what a finalizer lets go of is found in a later one, and a turn that
    begins while another thread collects does nothing.
    """
    alive = list(references)
    for _ in range(5):
        alive = [reference for reference in alive if reference() is not None]
        if not alive:
            return []
        gc.collect()
        time.sleep(0.01)
    found = []
    for reference in alive:
        value = reference()
        by = [
            f"{type(other).__qualname__} {sorted(map(str, other))[:8] if isinstance(other, dict) else other!r:.200}"
            for other in gc.get_referrers(value)
            if other is not alive and not isinstance(other, types.FrameType)
        ]
        found.append(f"{type(value).__qualname__} is held by {by or 'no object of Python'}")
    return found


def collected(action: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``action`` returns, and the text of every warning of ours it gave, repetitions included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    return result, [str(item.message) for item in caught if item.category is Gemma4CompatWarning]


def foreign(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper as another library would put it on: ``functools.wraps`` as it is, which copies ``__dict__``."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return "foreign", function(*args, **kwargs)

    return wrapper


@dataclass(frozen=True)
class Finished:
    """A child process that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        """What it printed as JSON on its last line."""
        last = self.stdout.strip().rpartition("\n")[2]
        if not last.startswith(("{", "[")):
            raise AssertionError(f"the child ended with {self.code} and no JSON:\n{self.stdout}\n{self.stderr}")
        return json.loads(last)


def cut_short(what: BaseException | str, folder: Path) -> Callable[..., Any]:
    """In place of a function that writes: raise ``what``, or send the signal of that name to this process.

    It fails the test where ``folder`` is empty: then there is nothing to clean up.
    """

    def fail(*_: Any, **__: Any) -> Any:
        assert list(folder.iterdir()), "it fails while there is something to clean up"
        if isinstance(what, str):
            os.kill(os.getpid(), getattr(signal, what))
            return b""
        raise what

    return fail


def child(
    *arguments: str,
    path: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
    isolated: bool = False,
    timeout: float = 240,
    python: str = sys.executable,
) -> Finished:
    """Run this interpreter with ``arguments`` (``"-c", script``), the repository and ``path`` on its sys.path.

    Args:
        arguments: of the interpreter.
        path: folders on sys.path before those of the interpreter.
        environment: variables to set; those of this package are otherwise unset.
        isolated: leave the interpreter's site-packages out.
        timeout: seconds after which the child has hung, which fails the test.
        python: what takes the arguments.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GEMMA4_COMPAT_")}
    inherited.pop("PYTHONWARNINGS", None)
    outer = "" if isolated else inherited.get("PYTHONPATH", "")
    search = os.pathsep.join(filter(None, [str(ROOT), *map(str, path), outer]))
    done = subprocess.run(
        [python, *(["-S"] if isolated else []), *arguments],
        env=inherited | {"PYTHONPATH": search, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"} | dict(environment or {}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cells of a grid, few of them, in which every two values of different factors meet (all-pairs testing).

    What only three values together show is for the random search (``tests/generated/search``).
    """
    cells = list(itertools.product(*(range(len(factor)) for factor in factors)))

    def pairs(cell: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(cell), 2))

    missing = set().union(*map(pairs, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        missing -= pairs(best)
        chosen.append(best)
    return [tuple(factor[index] for factor, index in zip(factors, cell, strict=True)) for cell in sorted(chosen)]
