"""F100: 8-bit layers say once that they cast their inputs, and compute what they computed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.quantization import bitsandbytes_int8_notice
from gemma4_compat.patches.quantization.bitsandbytes_int8_notice import PATCH
from tests.conftest import is_affected
from tests.helpers import without
from tests.patches.promise import Promise

affected = pytest.mark.skipif(not is_affected(PATCH), reason="this bitsandbytes warns, and Python shows that once")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"one forward logs ([2-9]|\d\d+) times: MatMul8bitLt: inputs will be cast"
    exact = False


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsandbytes_int8_notice._once, "said", set())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if "inputs will be cast" in line]


@affected
def test_generating_and_a_training_step_say_it_once(workspace: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = workspace.load("8bit")
    found = workspace.outputs(model)
    batch = workspace.inputs(text_only=True)
    model.train()(**batch, labels=batch["input_ids"]).loss.backward()
    lines = said(caplog)
    assert 1 <= len(lines) == len(set(lines)) <= 2  # of each dtype that the parts of the model compute in
    with without(PATCH.id):
        assert difference(found, workspace.outputs(workspace.load("8bit"))) == 0.0
    assert len(said(caplog)) > 100


@affected
def test_each_dtype_is_said(workspace: Any, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    layer = workspace.load("8bit").model.language_model.layers[0].mlp.up_proj
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32):
        layer(torch.ones(1, layer.in_features, dtype=dtype))
    assert len(said(caplog)) == 2


@affected
def test_other_lines_are_left_alone_and_no_filter_stays(workspace: Any, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(bitsandbytes_int8_notice._MODULE)
    before = list(logger.filters)
    workspace.outputs(workspace.load("8bit"), text_only=True)
    assert logger.filters == before
    for _ in range(2):
        assert bitsandbytes_int8_notice._once.filter(logging.makeLogRecord({"msg": "another sentence"}))
