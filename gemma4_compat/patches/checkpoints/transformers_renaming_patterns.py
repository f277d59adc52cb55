"""Loading and saving do not compile a regular expression for each tensor.

Symptom: silent: every ``from_pretrained``, ``save_pretrained`` and ``model.load_adapter`` spends part of its time on
regular expressions that nothing uses.

Cause: transformers makes a ``WeightRenaming`` from the name of every tensor, and each compiles a pattern of it, as if
it had to be found in other names. All these patterns differ, so the cache of ``re`` does not help, and other code's
entries are evicted from it.

Fix: A ``WeightRenaming`` from one plain name to another (letters, digits, ``_`` and dots) compiles its pattern on
first use. Its attributes are upstream's, including the pattern, which upstream's code makes. Other patterns and other
classes are unchanged.

Remove when: transformers makes none of these objects for single tensors, or compiles a pattern when it is used.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_MODULE, _CLASS = "transformers.core_model_loading", "WeightRenaming"
_LISTS = ("source_patterns", "target_patterns", "_original_source_patterns", "_original_target_patterns")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
#: What upstream compiles instead of a name: always the same text, so ``re`` has it in its cache.
_STAND_IN = "weight"


class Later:
    """The pattern of a ``WeightRenaming``, compiled when it is first used.

    Two threads that use it first at the same time both compile it, with equal results.
    """

    __slots__ = ("_found", "_kind", "_names", "_original")

    def __init__(self, original: Callable[..., None], kind: type, names: tuple[str, str]) -> None:
        self._original, self._kind, self._names = original, kind, names
        self._found: Any = None

    def _pattern(self) -> Any:
        if self._found is None:
            other: Any = object.__new__(self._kind)
            self._original(other, *self._names)
            self._found = other.compiled_sources
        return self._found

    @property  # type: ignore[misc]  # for isinstance
    def __class__(self) -> Any:
        return re.Pattern

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pattern(), name)

    def __repr__(self) -> str:
        return repr(self._pattern())

    def __eq__(self, other: object) -> bool:
        return bool(self._pattern() == (other._pattern() if type(other) is Later else other))

    def __hash__(self) -> int:
        return hash(self._pattern())

    # A copy of a pattern is the pattern itself.

    def __copy__(self) -> Later:
        return self

    def __deepcopy__(self, memo: Any) -> Later:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return re.compile, (self._pattern().pattern, self._pattern().flags)


def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    if kwargs or len(args) != 2 or not (_is_plain(args[0]) and _is_plain(args[1])) or not _is_renaming(self):
        original(self, *args, **kwargs)
        return
    original(self, _STAND_IN, _STAND_IN)
    for name, value in zip(_LISTS, args * 2):
        if hasattr(self, name):  # transformers 5.5 keeps no originals
            getattr(self, name)[0] = value
    self.compiled_sources = Later(original, type(self), args)


def _is_plain(name: Any) -> bool:
    return type(name) is str and _PLAIN.fullmatch(name) is not None


def _is_renaming(value: Any) -> bool:
    return type(value) is vars(sys.modules[_MODULE])[_CLASS]


def reproduce(workspace: Workspace) -> Outcome:
    import safetensors

    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.workspace import difference

    with safetensors.safe_open(workspace.checkpoint / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    loaded: list[Any] = []
    count = compiled(names, lambda: loaded.append(tiny.load(workspace.checkpoint, device=workspace.main)))
    if count:
        return Outcome(True, f"{count} regular expressions were compiled for the names of {len(names)} tensors")
    found = difference(workspace.reference(), workspace.outputs(loaded[0]))
    return Outcome.of_parity(found, "a load that compiles no regular expression for a tensor")


def compiled(names: Collection[str], action: Callable[[], Any]) -> int:
    """How many regular expressions that contain one of the names ``action`` compiles in this thread."""
    texts: list[str] = []

    def watch(frame: Any, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code is re.compile.__code__:
            texts.append(str(frame.f_locals["pattern"]))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        action()
    finally:
        sys.setprofile(before)
    return sum(any(name in text for name in names) for text in texts)


PATCH = Patch(
    id="transformers-renaming-patterns",
    kind=Kind.SPEED,
    severity=Severity.SPEED,
    failure_points=("F73",),
    distribution="transformers",
    affected=">=5.5",
    acts_on=ActsOn.EVERY_MODEL,
    targets=(Target(module=_MODULE, name=f"{_CLASS}.__init__", replacement=init),),
    reproduce=reproduce,
)
