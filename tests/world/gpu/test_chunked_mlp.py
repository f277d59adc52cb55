"""F110 on a GPU: norms in pieces and what nobody reads change no bit of a long step; MLPs in pieces only round."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gemma4_compat._training import mlp, norms, per_layer, shared_states
from tests.patches.training.test_transformers_chunked_loss import off, step
from tests.unit.training.test_norms import checkpointed

#: So many that norms of these widths have several pieces.
DEVICE, LENGTH, TOKENS = "cuda", 16_384, 2_048


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backward passes with the same bits each time, which cuDNN's attention does not have."""
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)


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
    mlp.chunked_mlp(model, tokens=TOKENS)
    outputs, found = step(model, given)
    print(dtype, "loss equal:", outputs.loss.equal(plain.loss), "gradients apart:", off(right, found))
    assert outputs.loss.item() == pytest.approx(plain.loss.item(), rel=1e-3)
    assert off(right, found) <= 0.05


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
    mlp.chunked_mlp(model, tokens=TOKENS)
    pieces = peak()
    print(f"{whole / 2**30:.2f} GiB whole, {pieces / 2**30:.2f} in pieces")
    assert pieces < whole
