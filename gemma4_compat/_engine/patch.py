"""What a patch is, and what the engine says about it. Plain data: no upstream library, no engine."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

#: A parity figure is the largest absolute logit difference over this many forwards; tokens of a generate must agree.
FORWARDS = 3

# `StrEnum` would say this better; it needs Python 3.11 and the floor is 3.10.


class Severity(str, enum.Enum):
    """What happens to a user without the patch. :class:`Kind` says what the patch does about it."""

    CRASH = "crash"
    WRONG_RESULT = "wrong_result"
    MEMORY = "memory"
    SPEED = "speed"

    __str__ = str.__str__


class Kind(str, enum.Enum):
    """What a patch mainly does. ``GEMMA4_COMPAT_DISABLE`` takes a kind, and switches off all its patches.

    ``repair``: makes something work that crashed, was wrong or took needless memory. ``refusal``: turns something that
    cannot work, or silently goes wrong, into one error before anything is changed. ``speed``: the same results,
    sooner. ``notice``: says something, or says it less often; nothing is computed differently.
    """

    REPAIR = "repair"
    REFUSAL = "refusal"
    SPEED = "speed"
    NOTICE = "notice"

    __str__ = str.__str__


class ActsOn(str, enum.Enum):
    """The models that a patch changes something for."""

    GEMMA4 = "Gemma 4"
    QAT = "QAT checkpoints"  # Google's, with weights of `GemmaQuantizer`
    EVERY_MODEL = "every model"  # the defect is not Gemma 4's

    __str__ = str.__str__


class Detection(str, enum.Enum):
    """What the loaded code says, after the version said "maybe"."""

    AFFECTED = "affected"
    NOT_AFFECTED = "not_affected"
    UNKNOWN = "unknown"

    __str__ = str.__str__


class PatchState(str, enum.Enum):
    """The stages of a patch.

    ``registered`` (known, not armed) -> ``skipped`` (opted out, library absent or too old, requirement unmet) |
    ``not_needed`` (release outside ``affected``, or the loaded code has no defect) | ``pending`` (armed, waiting for
    the import) -> ``applied`` | ``failed`` (unknown code; nothing of it remains) ; ``applied`` -> ``reverted``.
    """

    REGISTERED = "registered"
    SKIPPED = "skipped"
    NOT_NEEDED = "not_needed"
    PENDING = "pending"
    APPLIED = "applied"
    FAILED = "failed"
    REVERTED = "reverted"

    __str__ = str.__str__


class Reason(str, enum.Enum):
    """Why a patch is in its state. :attr:`PatchStatus.reason` says the same in words, with names and releases.

    docs/STATES.md has a line for each. The values do not change; new ones may be added.
    """

    # registered
    NOT_ARMED = "not_armed"
    # pending
    WAITING = "waiting"
    ARMED = "armed"
    # skipped
    DISABLED = "disabled"
    NOT_INSTALLED = "not_installed"
    TOO_OLD = "too_old"
    ONLY_WITH = "only_with"
    # not needed
    OUT_OF_RANGE = "out_of_range"
    NO_DEFECT = "no_defect"
    # applied
    AFFECTED = "affected"
    UNMEASURED = "unmeasured"
    IN_PART = "in_part"
    NEEDS = "needs"
    # failed
    CODE_DIFFERS = "code_differs"
    MODULE_ABSENT = "module_absent"
    NO_SOURCE = "no_source"
    WRAPPED = "wrapped"
    REPLACED = "replaced"
    UNRECOGNIZED = "unrecognized"
    UPGRADED = "upgraded"
    BROKEN_FILE = "broken_file"
    ERROR = "error"
    # reverted
    REVERTED = "reverted"

    __str__ = str.__str__


@dataclass(frozen=True)
class Outcome:
    """What a reproduction found.

    Attributes:
        defect: the defect was seen.
        detail: what was seen, with the measured value.
        parity: largest absolute difference from the same weights on one device (0.0 is bit-exact); None if the
            reproduction compares something other than logits.
        applicable: the situation can exist here; False if, say, this release lacks the model class, or this CPU the
            instructions (then ``defect`` is False and ``detail`` says what is missing).
    """

    defect: bool
    detail: str
    parity: float | None = None
    applicable: bool = True

    @classmethod
    def of_parity(cls, found: float, what: str) -> Outcome:
        """Any difference from the same weights on one device is a defect."""
        if found == 0.0:
            return cls(False, f"{what}: {FORWARDS} forwards and generate bit-exact", 0.0)
        return cls(True, f"{what}: logits differ by {found:.3g} from the same weights on one device", found)

    @classmethod
    def of_error(cls, error: Exception) -> Outcome:
        """A crash is a defect."""
        return cls(True, f"{type(error).__name__}: {' '.join(str(error).split())}")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One upstream function and its replacement.

    Attributes:
        module: the leaf module that defines it (``"bitsandbytes.nn.modules"``), never a re-exporting package.
        name: its dotted path there (``"Params4bit.to"``).
        replacement: ``replacement(original, *args, **kwargs)``; for methods ``args[0]`` is ``self`` (or ``cls``).
        known: fingerprints (see :mod:`gemma4_compat._engine.fingerprint`) of the upstream code this was proven on,
            with the releases that carry it ("1.12.0 - 1.14.0"). Code with any other fingerprint is never replaced. A
            patch file leaves this out: the registry fills it in from the measured data.
        codes: for code of torch, whose releases are not pinned here and not measured one by one: fingerprint -> which
            releases are known to have it. ``known`` then has these in every affected release of the distribution.
        optional: the module or name does not exist in every affected release; where it is missing it is left out.
        affected: the releases of the patch's distribution that need this target, if not all of the patch's do; in the
            others it is left out.
        dormant: whether nothing in this process can need it yet, or a function that says so; its argument is whether
            the library may have been used before. The installed function then calls the original until
            :func:`gemma4_compat._engine.dormant.activate`.
        activator: it only activates the patch. If it does not exist, or its code is unknown, it is left out, and
            nothing of the patch is dormant.
        attribute: it is not a function but what instances read under that name: a plain value of the class, or only
            their own. ``replacement(original, instance)`` reads it; what instances set is kept as it is.
        group: targets of one group are replaced together, as soon as the modules of that group are imported. A patch
            for two copies of the same code has two groups, and the one does not wait for the other.
    """

    module: str
    name: str
    replacement: Callable[..., Any]
    known: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    codes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    optional: bool = False
    affected: str = ""
    dormant: bool | Callable[[bool], bool] = False
    activator: bool = False
    attribute: bool = False
    group: str = ""

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One defect and its repair. The vocabulary is that of DEP-3, OSV and PyPA version specifiers.

    A patch file says each thing once (``patches/api.py``): ``id``, ``distribution`` and ``area`` come from its place,
    ``summary``, ``symptom`` and ``retire_when`` from its docstring, ``fixed`` from ``affected``, ``targets`` from what
    its functions replace, ``measured`` and ``known`` from the measured data.

    Attributes:
        id: ``<distribution>-<slug>``; it never changes.
        kind: see :class:`Kind`.
        severity: see :class:`Severity`.
        failure_points: sections of docs/FAILURE_POINTS.md this patch answers (``F1`` ...).
        distribution: the library whose code is replaced.
        affected: PEP 440 specifier of its affected releases; closed by ``<fixed`` once a fix is released.
        requires: PEP 508 requirements on *other* distributions without which there is no defect.
        targets: every function that is replaced.
        reproduce: builds the situation through public API and reports (or raises) the defect; ``doctor`` runs it.
        bug: where upstream tracks it.
        applied_upstream: the upstream change that fixes it, if there is one.
        fixed: the first release with that change.
        after: ids of patches that must be applied before this one. The engine applies patches in the order of the
            registry; a contract test checks the registry against this.
        needs: ids of patches without which this one does not make the situation exact.
        acts_on: see :class:`ActsOn`. A test runs other models with and without the patches that are not for them.
        detect: a cheap, static look at the loaded code that may say ``NOT_AFFECTED`` (or ``UNKNOWN``) although the
            version is in range; the fingerprints of ``targets`` are checked after it.
        summary: one sentence, what is repaired.
        symptom: what the user sees: exception type and message, or ``silent: ...``.
        retire_when: the condition under which the file is deleted.
        documentation: the docstring of the file.
        area: what it is about: "placement", "offload", ...
        measured: the newest release it was proven on. Beyond it the patch applies only to unchanged code.
    """

    id: str
    kind: Kind
    severity: Severity
    failure_points: tuple[str, ...]
    distribution: str
    affected: str
    targets: tuple[Target, ...]
    reproduce: Callable[[Any], Outcome]
    acts_on: ActsOn
    requires: tuple[str, ...] = ()
    bug: tuple[str, ...] = ()
    applied_upstream: str | None = None
    fixed: str | None = None
    after: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    detect: Callable[[], Detection] | None = None
    summary: str = ""
    symptom: str = ""
    retire_when: str = ""
    documentation: str = ""
    area: str = ""
    measured: str = ""

    @property
    def first_symptom(self) -> str:
        """``symptom`` up to its first full stop that is not in code."""
        found = re.match(r"(?:``.*?``|[^`])*?\.(?= |$)", self.symptom)
        return found.group() if found else self.symptom

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Group of targets -> the modules that must be imported, completely, before it can be applied."""
        found: dict[str, dict[str, None]] = {}
        for target in self.targets:
            modules = found.setdefault(target.group, {})
            if not (target.optional or target.activator):
                modules[target.module] = None
        return {group: tuple(modules) for group, modules in found.items()}

    @property
    def modules(self) -> tuple[str, ...]:
        """Every module that any group waits for."""
        return tuple(dict.fromkeys(module for modules in self.groups.values() for module in modules))


class LatePatch(NamedTuple):
    """A patch whose file is imported when one of its modules is, or when somebody asks about it.

    Attributes:
        id: of the patch.
        modules: of all its targets, including the optional ones.
        load: imports the file and returns the patch. What it raises becomes the reason of a failed patch.
    """

    id: str
    modules: tuple[str, ...]
    load: Callable[[], Patch]


@dataclass(frozen=True, kw_only=True)
class PatchStatus:
    """What happened to one patch in this process.

    Attributes:
        id: the patch.
        state: see :class:`PatchState`.
        reason_code: why it is in that state, see :class:`Reason`.
        reason: the same in one sentence, with names and releases. For people: its wording may change.
        versions: releases seen when that was decided, by distribution (absent ones are left out).
        late: applied after its library had been imported; names other modules had taken by then were rebound.
        unreached: how many objects had taken a replaced function before, and still call the original: registries,
            class attributes, closures, bound methods of models that were split by then. None if they were not
            counted, which takes ``status(unreached=True)``.
        overridden: replaced functions that another library has replaced again since.
        unmet: ids of patches that this one needs to be exact and that are off: disabled, failed or reverted.
        detection: what the loaded code said; None if it was not examined, or its examination did not cause the
            failure.
        at: when the state was entered, seconds since the epoch (``time.time()``).
    """

    id: str
    state: PatchState
    reason_code: Reason
    reason: str
    versions: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    late: bool = False
    overridden: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    unreached: int | None = None
    detection: Detection | None = None
    at: float = 0.0
