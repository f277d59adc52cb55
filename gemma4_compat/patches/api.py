"""What a patch file is written with. The file's place says the rest.

``patches/generation/transformers_static_cache.py`` is the patch ``transformers-static-cache`` of the distribution
``transformers``, in the area ``generation``::

    PATCH = Patch("F24", severity="crash", affected=">=5.5.0,<5.10.1", acts_on="every model")


    @PATCH.replaces("transformers.cache_utils", "StaticCache.__init__")
    def static_cache(original: Original, self: Any, config: Any, *args: Any, **kwargs: Any) -> Any: ...


    def reproduce(workspace: Workspace) -> Outcome: ...

``reproduce`` builds the situation through public API and returns, or raises, the defect. If there is a function
``detect``, it looks at the loaded code: see :class:`gemma4_compat.Patch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urljoin

from gemma4_compat._engine import patch as engine
from gemma4_compat._engine.patch import FORWARDS, Detection, Outcome

if TYPE_CHECKING:
    from gemma4_compat._lab.workspace import Workspace
else:  # patch files only annotate with it, and reproductions need torch
    Workspace = Any

__all__ = [
    "FORWARDS",
    "MODELING_DIFFUSION",
    "MODELING_GEMMA4",
    "MODELING_UNIFIED",
    "Detection",
    "Original",
    "Outcome",
    "Patch",
    "Workspace",
]

MODELING_DIFFUSION = "transformers.models.diffusion_gemma.modeling_diffusion_gemma"
MODELING_GEMMA4 = "transformers.models.gemma4.modeling_gemma4"
MODELING_UNIFIED = "transformers.models.gemma4_unified.modeling_gemma4_unified"

#: Where the links of a patch begin.
_REPOSITORIES = {
    "transformers": "https://github.com/huggingface/transformers/",
    "accelerate": "https://github.com/huggingface/accelerate/",
    "peft": "https://github.com/huggingface/peft/",
    "bitsandbytes": "https://github.com/bitsandbytes-foundation/bitsandbytes/",
}

#: What a replacement gets first: upstream's function, with the patches that are below this one.
Original = Callable[..., Any]

_Replacement = TypeVar("_Replacement", bound=Callable[..., Any])
_Choice = TypeVar("_Choice", engine.Severity, engine.Kind, engine.ActsOn)


class Patch:
    """What a patch file declares: one defect, and what is replaced against it.

    :class:`gemma4_compat.Patch` explains the arguments; the engine reads that one, which :meth:`complete` makes.

    A list is written with spaces ("F3 F13"), and a link from the distribution's repository on ("issues/45663").
    """

    def __init__(
        self,
        failure_points: str,
        *,
        severity: Literal["crash", "wrong_result", "memory", "speed"],
        affected: str,
        kind: Literal["repair", "refusal", "speed", "notice"] = "repair",
        acts_on: Literal["Gemma 4", "QAT checkpoints", "every model"] = "Gemma 4",
        requires: str = "",
        after: str = "",
        needs: str = "",
        bug: str = "",
        applied_upstream: str = "",
    ) -> None:
        file = sys._getframe(1).f_globals["__name__"].rpartition(".")[2]  # of the file that declares it
        self.id = file.replace("_", "-")
        self.distribution = file.partition("_")[0]
        self.affected = affected
        self.requires = tuple(requires.split())
        links = _REPOSITORIES.get(self.distribution, "")
        self._said: dict[str, Any] = {
            "failure_points": tuple(failure_points.split()),
            "severity": _one_of(engine.Severity, severity),
            "kind": _one_of(engine.Kind, kind),
            "acts_on": _one_of(engine.ActsOn, acts_on),
            "after": tuple(after.split()),
            "needs": tuple(needs.split()),
            "bug": tuple(urljoin(links, link) for link in bug.split()),
            "fixed": affected.partition("<")[2] or None,  # releases are affected until one is fixed
            "applied_upstream": urljoin(links, applied_upstream) if applied_upstream else None,
        }
        self._targets: dict[str, engine.Target | None] = {}

    def replaces(
        self,
        module: str,
        name: str,
        *,
        affected: str = "",
        optional: bool = False,
        group: str = "",
        dormant: bool | Callable[[bool], bool] = False,
        activator: bool = False,
        attribute: bool = False,
        codes: Mapping[str, str] = MappingProxyType({}),
    ) -> Callable[[_Replacement], _Replacement]:
        """The decorated function replaces ``module.name``: it is called with the original and the arguments.

        :class:`gemma4_compat._engine.patch.Target` explains the arguments. Decorators of one function add up. In a
        loop, or for a function of another file: ``PATCH.replaces("peft.peft_model", "f")(loading.f)``.
        """
        label = f"{module}.{name}"
        if label in self._targets:
            raise ValueError(f"{self.id} replaces {label} twice")
        self._targets[label] = None  # a place in the order of the file: the last decorator acts first

        def add(replacement: _Replacement) -> _Replacement:
            self._targets[label] = engine.Target(
                module=module,
                name=name,
                replacement=replacement,
                affected=affected,
                optional=optional,
                group=group,
                dormant=dormant,
                activator=activator,
                attribute=attribute,
                codes=codes,
            )
            return replacement

        return add

    @property
    def targets(self) -> tuple[engine.Target, ...]:
        """What is replaced, in the order of the file."""
        for label, target in self._targets.items():
            if target is None:
                raise ValueError(f"{self.id} replaces {label}, but no function follows `replaces`")
        return tuple(filter(None, self._targets.values()))

    def complete(self, module: ModuleType) -> engine.Patch:
        """What the engine reads, with ``reproduce`` and ``detect`` of the patch file."""
        return engine.Patch(
            id=self.id,
            distribution=self.distribution,
            affected=self.affected,
            requires=self.requires,
            targets=self.targets,
            reproduce=module.reproduce,
            detect=getattr(module, "detect", None),
            **self._said,
        )


def _one_of(choices: type[_Choice], value: str) -> _Choice:
    try:
        return choices(value)
    except ValueError:
        said = ", ".join(map(repr, map(str, choices)))
        raise ValueError(f"{choices.__name__.lower()} {value!r} is not one of {said}") from None
