"""F110 on a GPU: norms in pieces and what nobody reads change no bit of a long step; MLPs in pieces only round."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gemma4_compat._training import norms, per_layer, shared_states
from tests.patches.training.parts import only
from tests.patches.training.test_transformers_chunked_loss import off, step
from tests.unit.training.test_norms import checkpointed

#: So many that norms of these widths have several pieces.
DEVICE, LENGTH, TOKENS = "cuda", 16_384, 2_048


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backward passes with the same bits each time: of attention, only PyTorch's plain kernels have them."""
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


def adapted(dtype: Any) -> Any:
    """Five layers of an E2B, the last two with shared keys, per-layer inputs, and an adapter on all linear layers."""
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=5,
        layer_types=[
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        num_kv_shared_layers=2,
        vocab_size=1024,
        vocab_size_per_layer_input=1024,
    )
    with torch.device(DEVICE):
        model = transformers.Gemma4ForCausalLM(config).to(dtype)
    lora = LoraConfig(r=8, target_modules=r".*layers\..*_proj", init_lora_weights=False)
    return checkpointed(get_peft_model(model, lora), False)


def batch() -> dict[str, Any]:
    """A long text, of which the last tokens are trained: the mean of all would be too little for float16."""
    ids = torch.randint(3, 1024, (1, LENGTH), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    labels = ids.clone()
    labels[:, :-128] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bits(dtype: Any) -> None:
    model, given = adapted(dtype), batch()
    plain, right = step(model, given)
    again, same = step(model, given)
    assert again.loss.equal(plain.loss)
    assert off(right, same) == 0  # else bits say nothing
    for part in (norms, shared_states, per_layer):
        part.ask(model, TOKENS)
        outputs, found = step(model, given)
        part.leave(model)
        assert outputs.loss.equal(plain.loss), part
        assert off(right, found) == 0, part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mlps_in_pieces_only_round(dtype: Any) -> None:
    """Their gradients are as far from those in float32 as without pieces."""
    model, given = adapted(dtype), batch()
    exact, right = step(copy.deepcopy(model).float(), given)
    plain, found = step(model, given)
    error = off(right, found)
    only(model, mlp=TOKENS)
    outputs, found = step(model, given)
    print(dtype, "gradients against float32:", error, "whole,", off(right, found), "in pieces")
    assert off(right, found) <= 1.2 * error
    assert abs(outputs.loss - exact.loss) <= 1.2 * abs(plain.loss - exact.loss) + 1e-3


def test_memory() -> None:
    """The peak of a step beyond what is there before it."""
    model, given = adapted(torch.bfloat16), batch()

    def peak() -> int:
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(model, given)
        return int(torch.cuda.max_memory_allocated() - before)

    whole = peak()
    only(model, mlp=TOKENS)
    pieces = peak()
    print(f"{whole / 2**30:.2f} GiB whole, {pieces / 2**30:.2f} in pieces")
    assert pieces < whole
