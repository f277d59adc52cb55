"""Experts that stay on a GPU: its memory comes and goes, and tokens have the bits of host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._generation import expert_slots
from gemma4_compat._graphs import decoder, fused_steps
from gemma4_compat._lab import tiny_models
from tests.unit.generation import calls
from tests.unit.offload.test_expert_lookup import loaded, placed


def test_memory_comes_back_at_its_address() -> None:
    import torch

    from gemma4_compat._kernels.card_memory import CardMemory

    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    before, size = torch.cuda.mem_get_info(device)[0], 1 << 30
    memory, tensor = CardMemory(device, size), None
    for number in range(3):
        assert memory.take()
        assert before - torch.cuda.mem_get_info(device)[0] >= size
        again = memory.tensor()
        assert tensor is None or tensor.data_ptr() == again.data_ptr()
        tensor = again
        tensor.fill_(number)
        assert int(tensor[size - 1]) == number
        torch.cuda.synchronize(device)
        memory.give_back()
        assert before - torch.cuda.mem_get_info(device)[0] < size // 8
    assert not CardMemory(device, torch.cuda.get_device_properties(device).total_memory * 2).take()


@pytest.mark.parametrize("quantization", ["4bit-double", "4bit", None])
@pytest.mark.parametrize("slots", [2, 6, 32])
def test_the_same_answers(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, slots: int, quantization: str | None
) -> None:
    checkpoint: Path = workspace.cached(tiny_models.build_moe_checkpoint)
    options = {"experts_implementation": "grouped_mm"}
    monkeypatch.setattr(fused_steps.Progress, "after", 8)
    monkeypatch.setattr(expert_slots, "number", lambda *_: slots)
    model = placed(workspace, loaded(workspace, checkpoint, quantization, **options), "experts", "memory")
    model, plain = map(gemma4_compat.decode_fast, (model, loaded(workspace, checkpoint, quantization, **options)))
    for batch, seed in ((1, 7), (1, 8), (3, 9), (1, 7)):
        found, expected = (
            calls.generate(one, calls.text(one, batch=batch, seed=seed), new=40) for one in (model, plain)
        )
        calls.assert_equal(found, expected)
        assert not decoder.of(model).experts.is_there
    counted = gemma4_compat.statistics(model).decoding
    assert (counted.reasons, counted.not_fused) == ((), ()), counted
    assert counted.fused
    assert counted.experts_kept > 0
    assert counted.experts_brought > 0
