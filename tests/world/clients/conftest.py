"""Software that runs on top of the libraries, given a split model: what it answers on one device.

``nox -s clients`` installs it. Elsewhere a test is skipped, with the reason, where its package is missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.world.clients import models

_HERE = Path(__file__).parent
_PACKAGES = ("lm-eval", "trl", "datasets", "torch", "transformers", "accelerate", "peft", "bitsandbytes")
_outcomes: dict[str, str] = {}


@pytest.hookimpl(tryfirst=True)  # before what is marked is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.full)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid.startswith("tests/world/clients/") and (report.when == "call" or report.outcome != "passed"):
        _outcomes[report.nodeid.removeprefix("tests/world/clients/")] = report.outcome


def pytest_sessionfinish() -> None:
    """``GEMMA4_COMPAT_CLIENTS=FILE``: the outcomes and the releases they were seen on."""
    if file := os.environ.get("GEMMA4_COMPAT_CLIENTS"):
        versions = {}
        for name in _PACKAGES:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        result = {"versions": versions, "outcomes": dict(sorted(_outcomes.items()))}
        Path(file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def processor() -> Any:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    return models.processor()


@pytest.fixture(params=models.PLACEMENTS)
def split(request: pytest.FixtureRequest, workspace: Any) -> Callable[..., Any]:
    """``split(quantization=None)``: the model on several devices."""
    return lambda quantization=None: models.split(workspace, request.param, quantization)


@pytest.fixture
def whole(workspace: Any) -> Callable[..., Any]:
    """``whole(quantization=None)``: the same model on one device."""
    return lambda quantization=None: models.whole(workspace, quantization)
