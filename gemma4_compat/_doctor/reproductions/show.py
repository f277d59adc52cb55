"""``doctor --show ID``: a silent defect as an answer of the trained model, without the shim and with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gemma4_compat._doctor.explain import imports
from gemma4_compat._doctor.reproductions import children
from gemma4_compat._doctor.reproductions.scenes import SCENES
from gemma4_compat._engine.patch import Patch
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._lab.trained import Trained


@dataclass(frozen=True)
class Shown:
    """What the model said.

    Attributes:
        patch: whose defect it is.
        without: of the child process without the shim: ``answer`` or ``error``, ``state`` and ``reason``.
        with_shim: of the one with it, as the environment configures it.
    """

    patch: Patch
    without: dict[str, Any]
    with_shim: dict[str, Any]

    @property
    def good(self) -> bool:
        """Whether the answer with the shim is right."""
        return _right(self.patch.id, self.with_shim)

    def text(self) -> str:
        """For a terminal: what was done, what was asked, both answers, and what they mean."""
        scene = SCENES[self.patch.id]
        lines = {
            "what is done": scene.does,
            "question": scene.asked,
            "right answer": scene.right,
            "without the fix": said(self.without),
            "with the fix": said(self.with_shim),
        }
        width = max(map(len, lines))
        table = "\n".join(f"  {name:{width}}  {line}" for name, line in lines.items())
        return f"{self.patch.id}: {self.patch.summary}\n\n{table}\n\n{self._verdict()}"

    def _verdict(self) -> str:
        if not self.good and (advice := imports.advice(self.with_shim.get("error") or "")):
            return f"The model was not asked.{advice}"
        if not self.good:
            state, reason = self.with_shim["state"], self.with_shim["reason"]
            return f"The answer is wrong with the shim: the patch is {state}. {reason}"
        if _right(self.patch.id, self.without):
            return (
                f"The answer is right without the shim too: this defect does not show here. {self.with_shim['reason']}"
            )
        return "The model is the same in both; only the shim differs."


def _right(patch_id: str, result: dict[str, Any]) -> bool:
    scene = SCENES[patch_id]
    return result.get("answer") == scene.right or bool(scene.refused and scene.refused in (result.get("error") or ""))


def said(result: dict[str, Any]) -> str:
    """The answer in quotes, or the error."""
    answer = result.get("answer")
    return repr(answer) if answer is not None else str(result.get("error") or result.get("detail"))


def show(patch: Patch, trained: Trained) -> Shown:
    """Ask the model in two child processes, one without the shim and one with it.

    Raises:
        Gemma4CompatError: nothing is shown of this patch.
    """
    if patch.id not in SCENES:
        raise Gemma4CompatError(f"--show has nothing for {patch.id!r}; it has {', '.join(sorted(SCENES))}")
    with ThreadPoolExecutor(2) as pool:
        without, with_shim = pool.map(
            lambda disabled: children.alone(f"show {patch.id}", trained.folder, disabled=disabled), ("all", "")
        )
    return Shown(patch, without, with_shim)
