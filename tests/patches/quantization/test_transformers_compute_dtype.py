"""F61: a 4-bit load that computes in float32 under a smaller dtype says so, once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gemma4_compat._lab import tiny_models
from gemma4_compat.patches.quantization.transformers_compute_dtype import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a bfloat16 model in 4 bits computes in float32, and no line of the log says so"
    exact = False


@pytest.mark.parametrize(
    "dtype, options, line",
    [
        ("bfloat16", {"load_in_4bit": True}, True),
        ("float16", {"load_in_4bit": True}, True),
        ("float32", {"load_in_4bit": True}, False),
        ("bfloat16", {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}, False),
        ("bfloat16", {"load_in_8bit": True}, False),
        ("bfloat16", None, False),
    ],
    ids=str,
)
def test_what_is_said(
    workspace: Any, caplog: pytest.LogCaptureFixture, dtype: str, options: dict[str, Any] | None, line: bool
) -> None:
    import torch
    import transformers

    config = None if options is None else transformers.BitsAndBytesConfig(**options)
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        getattr(transformers, tiny_models.class_name(workspace.checkpoint)).from_pretrained(
            workspace.checkpoint,
            dtype=getattr(torch, dtype),
            device_map={"": workspace.main},
            quantization_config=config,
        )
    said = [message for message in caplog.messages if "compute in float32" in message]
    assert len(said) == line
    assert all(f"bnb_4bit_compute_dtype=torch.{dtype}" in message for message in said)
