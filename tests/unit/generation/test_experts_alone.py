"""Experts that see each token by itself: drafts and batches have its bits, and what would change them is found out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._gemma4.quantization import expert_forward, expert_storage, experts, packed_linear
from gemma4_compat._generation import continuous, experts_alone
from gemma4_compat._graphs import deferred_stop
from gemma4_compat._kernels.match import custom
from gemma4_compat._lab import tiny, tiny_models
from tests.unit.generation import calls, test_assisted
from tests.unit.generation.test_assisted import SAMPLED, ask, counted, drafting, same
from tests.unit.generation.test_continuous import kernels_by_row as kernels_by_row
from tests.unit.generation.test_continuous import with_experts
from tests.unit.kernels.by_rows import ByWidth
from tests.unit.offload.test_expert_lookup import placed

pytestmark = pytest.mark.usefixtures("tapes", "kernels_by_row")
DIFFERS = "experts: a token differs bitwise beside others, as "


@pytest.fixture
def any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of drafts, and speculative steps that are read late."""
    monkeypatch.setattr(test_assisted.draft_length, "DraftLength", test_assisted.AnyLength)
    monkeypatch.setattr(deferred_stop, "WAITING", 10.0)


@pytest.fixture(scope="module")
def assistant(workspace: Any) -> Any:
    folder = workspace.cached(tiny_models.build_moe_checkpoint)

    def assistant_with_experts(made: Path) -> None:
        tiny_models.build_assistant(folder, made, variant="26B-A4B")

    try:
        made = workspace.cached(assistant_with_experts)
        return tiny.load(made, device=workspace.main, cls=tiny_models.assistant_class(folder))
    except ImportError as error:
        pytest.skip(str(error))


def fast(workspace: Any, where: str = "device", quantization: str | None = "4bit-double") -> Any:
    model = with_experts(workspace, quantization)
    if where != "device":
        model = placed(workspace, model, "experts", where)
    return gemma4_compat.decode_fast(model, assistants=True)


@pytest.mark.usefixtures("any_pace")
@pytest.mark.parametrize("where", ["device", "memory"])
def test_tokens_are_those_without_drafts(
    workspace: Any, assistant: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    model = fast(workspace, where)
    ways: list[dict[str, Any]] = [{"assistant_model": assistant}, {"prompt_lookup_num_tokens": 5}]
    for seed, (length, options) in enumerate([(3, {}), (20, SAMPLED)]):
        given = calls.text(model, length, seed=seed)
        expected = ask(model, given, new=40, **options)
        for way in ways:
            same(expected, ask(model, given, new=40, **options, **way))
        with monkeypatch.context() as patched:
            drafting(patched, expected[0], 0.8)
            same(expected, ask(model, given, new=40, **options, **ways[0]))
    found = counted(model)
    assert found.reasons == ()
    assert found.accepted > 30
