"""What tests of ``gemma4-compat needed`` share: patches, samples, and shorthands for an assessment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Patch, cli
from gemma4_compat._engine import versions
from gemma4_compat._needed import judge

SAMPLES = Path(__file__).parent / "samples"
PATCHES = {patch.id: patch for patch in gemma4_compat.patches()}
OLDEST = versions.OLDEST
PINS = "transformers==5.6.2\naccelerate==1.13.0\npeft==0.19.1\nbitsandbytes==0.49.2\n"


def patch_on(affected: str, *requires: str, **fields: Any) -> Patch:
    """A patch on accelerate whose metadata are these; nothing else of it is looked at."""
    fields = {"distribution": "accelerate", "measured": "1.13.0", "fixed": None, **fields}
    return replace(
        PATCHES["accelerate-hf-initialized"], id="the-patch", affected=affected, requires=requires, **fields
    )


Ask = Callable[..., judge.Assessment]


def states(assessment: judge.Assessment) -> dict[str, str]:
    """Each library's line, without its name."""
    return {
        stated.distribution: str(stated).removeprefix(f"{stated.distribution} ") for stated in assessment.distributions
    }


def verdicts(assessment: judge.Assessment) -> dict[str, str]:
    return {need.patch.id: str(need.verdict) for need in assessment.needs}


def only(assessment: judge.Assessment) -> judge.Need:
    (need,) = assessment.needs
    return need


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, ["needed", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout
