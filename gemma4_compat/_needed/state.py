"""What a file, or the running environment, states about one distribution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gemma4_compat._engine import versions
from gemma4_compat._needed.ranges import is_version, text


@dataclass(frozen=True, kw_only=True)
class DistributionState:
    """What is stated about one distribution.

    Attributes:
        distribution: its name.
        ranges: PEP 440 specifiers, "" for any release; the release is inside one of them. Empty when it is absent, or
            when the release is not stated (``installed_from``).
        absence: how to say that it is absent or may be ("not installed"); empty when it is certainly there.
        installed_from: a path, URL or checkout that does not state the release; empty if the release is stated.
        origin: the extras or groups that require it, if nothing else does.
    """

    distribution: str
    ranges: tuple[str, ...] = ()
    absence: str = ""
    installed_from: str = ""
    origin: str = ""

    def __str__(self) -> str:
        if self.installed_from:
            return f"{self.distribution} from {self.installed_from}"
        if self.absence:
            limited = f" (there, it would be {self.releases})" if any(self.ranges) else ""
            return f"{self.distribution} {self.absence}{limited}"
        return f"{self.distribution} {self.releases}" + (f" ({self.origin})" if self.origin else "")

    @property
    def releases(self) -> str:
        """The ranges, for a reader."""
        return text(self.ranges)

    @property
    def named(self) -> bool:
        """Whether the source names it as something that is there."""
        return not self.absence


def installed(name: str) -> DistributionState:
    """The state of a distribution in the running environment."""
    version = versions.installed(name)
    return one_of(name, [] if version is None else [version], "not installed")


def one_of(name: str, releases: Iterable[str], absence: str) -> DistributionState:
    """The state of a distribution that is one of ``releases``.

    An entry that is not a version says what the distribution is installed from.
    """
    releases = list(dict.fromkeys(releases))
    if not releases:
        return DistributionState(distribution=name, absence=absence)
    for release in releases:
        if not is_version(release):
            return DistributionState(distribution=name, installed_from=release)
    return DistributionState(distribution=name, ranges=tuple(f"=={release}" for release in releases))
