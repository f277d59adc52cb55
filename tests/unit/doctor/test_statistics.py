"""``statistics``: three parts of one result, and how they print."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gemma4_compat
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.statistics import Cause, Recapture


def test_a_model_of_which_nothing_is_known() -> None:
    found = gemma4_compat.statistics(torch.nn.Linear(2, 2))
    assert str(found).splitlines() == [
        "decoding",
        "    nothing",
        "training",
        "    nothing",
        "attached",
        "    gemma4_compat has left nothing on this model",
    ]


def test_what_is_counted_is_printed(workspace: Any) -> None:
    """Each field that has something to say, one line for each cause and reason."""
    pytest.importorskip("transformers.modeling_layers")
    model = gemma4_compat.train_fast(workspace.load_text())
    counted = decoder.of(model).statistics
    counted.replayed, counted.capture_seconds, counted.reasons = 1999, 2.25, ("they compute on cpu", "another")
    counted.recaptures, counted.not_reused = {Cause.WEIGHT: 2, Cause.MEMORY: 1}, {"padding": 3}
    counted.last_recaptures = (Recapture(Cause.WEIGHT, "lm_head.weight"),)
    found = gemma4_compat.statistics(model)
    assert found.decoding is counted
    lines = str(found).splitlines()
    assert lines[: lines.index("training")] == [
        "decoding",
        "    replayed: 1,999",
        "    capture seconds: 2.2",
        "    reasons: they compute on cpu",
        "    reasons: another",
        "    recaptures: a weight changed: 2",
        "    recaptures: memory was short: 1",
        "    last recaptures: a weight changed: lm_head.weight",
        "    not reused: padding: 3",
    ]
    assert "    1 x _gemma4_compat_chunked_loss (transformers-chunked-loss)" in lines
    names = {item.name for item in found.attached}
    assert {"_gemma4_compat_training", "_gemma4_compat_trained_attention"} <= names
