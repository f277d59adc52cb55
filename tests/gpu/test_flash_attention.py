"""Flash attention with a package's kernel on a GPU (F54), and what attention of full-attention layers takes (F59)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._reproduction import tiny, tiny_models

#: Of the largest logit: each layer's attention is rounded to bf16 by either kernel.
BOUND = 0.1
KERNELS = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "kernels-community/flash-attn2": "kernels",
}


def _missing(package: str) -> str | None:
    import importlib.util

    return None if importlib.util.find_spec(package) else f"needs the package {package}"


def _load(folder: Path, implementation: str) -> Any:
    try:
        return tiny.load(folder, device=0, attn_implementation={"text_config": implementation})
    except (ImportError, ValueError, OSError) as error:  # not for this torch, or not downloaded
        pytest.skip(f"{implementation} cannot be loaded here: {error}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build_checkpoint(tmp_path_factory.mktemp("wide"), full_width=512)


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("padded", [False, True])
def test_the_answers_of_sdpa(
    folder: Path, implementation: str, padded: bool, record: Callable[[str, Any], None]
) -> None:
    import torch

    if reason := _missing(KERNELS[implementation]):
        pytest.skip(reason)
    plain, model = tiny.load(folder, device=0), _load(folder, implementation)
    ids = torch.randint(3, 240, (3, 64), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :20] = 0
        mask[2, :33] = 0
    found = []
    for each in (plain, model):
        output = each(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        weights = [weight.grad.float().flatten() for weight in each.parameters() if weight.grad is not None]
        found.append((output.logits.detach().float()[mask.bool()], torch.cat(weights)))
    (expected, gradients), (logits, others) = found
    off = {
        "logits": ((logits - expected).abs().max() / expected.abs().max()).item(),
        "gradients": ((others - gradients).norm() / gradients.norm()).item(),
    }
    record(f"flash attention {implementation} padded {padded}", off)
    assert off["logits"] <= BOUND
    assert off["gradients"] <= 3 * BOUND


@pytest.mark.parametrize("implementation", KERNELS)
def test_packed_sequences_are_apart(folder: Path, implementation: str) -> None:
    import torch

    if reason := _missing(KERNELS[implementation]):
        pytest.skip(reason)
    model = _load(folder, implementation)
    lengths = [17, 30, 9]
    ids = torch.randint(3, 240, (1, sum(lengths)), generator=torch.Generator().manual_seed(2)).cuda()
    positions = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
        packed = model(ids, position_ids=positions, use_cache=False).logits
    assert (alone - packed).abs().max() <= BOUND * alone.abs().max()


def test_memory_of_full_attention_grows_with_the_length(folder: Path, record: Callable[[str, Any], None]) -> None:
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model = tiny.load(folder, device=0)  # not the whole model: masks of its sliding layers grow with the square
    text = model.config.get_text_config()
    layer = model.get_decoder().layers[text.layer_types.index("full_attention")].self_attn
    peaks = {}
    for length in (4096, 16384):
        heads = (text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads)
        inputs = [torch.zeros((1, number, length, 512), dtype=torch.bfloat16, device=0) for number in heads]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            sdpa_attention_forward(layer, *inputs, None, scaling=1.0, is_causal=True)
        peaks[length] = torch.cuda.max_memory_allocated() - before
        del inputs
    record("attention of wide heads, peak bytes by length", peaks)
    assert peaks[16384] <= 6 * peaks[4096]  # 4 times the tokens; scores would be 16 times the bytes
