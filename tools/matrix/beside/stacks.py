"""The ``[beside]`` entries of tests/matrix.toml: a library that patches the same classes, and its releases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from tools.matrix.stacks import LIBRARIES, TABLE


@dataclass(frozen=True)
class Beside:
    """One library beside the shim.

    Attributes:
        name: of the entry, and in ``others.TURN_ON``.
        called: what people call it.
        module: what it is imported as, which messages name.
        why: what its releases are chosen for.
        pins: distribution -> release, the four libraries; they go before what the others ask for.
        install: requirements.
        ci: whether CI runs it.
    """

    name: str
    called: str
    module: str
    why: str
    pins: dict[str, str]
    install: list[str]
    ci: bool

    @property
    def pinned(self) -> list[str]:
        """The four libraries as requirements."""
        return [f"{name}=={release}" for name, release in self.pins.items()]


def read(file: Path = TABLE) -> dict[str, Beside]:
    """The entries, by name."""
    entries = tomllib.loads(file.read_text(encoding="utf-8"))["beside"]
    return {
        name: Beside(
            name=name,
            called=entry.get("called", name),
            module=entry.get("module", name),
            why=entry["why"],
            pins={library: entry[library] for library in LIBRARIES},
            install=entry.get("install", []),
            ci=entry.get("ci", False),
        )
        for name, entry in entries.items()
    }
