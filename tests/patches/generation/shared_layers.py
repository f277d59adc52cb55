"""What KV-shared layers compute in ``generate``, for the tests of the patches about it (F84)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from gemma4_compat._lab import tiny

OPTIONS: dict[str, Any] = {
    "max_new_tokens": 3,
    "min_new_tokens": 3,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
    "disable_compile": True,
}


@contextlib.contextmanager
def computed(model: Any) -> Iterator[list[int]]:
    """Inside, the positions that the first KV-shared layer computes, call by call. No module gets a hook."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers = model.get_decoder().layers
    (first, *_) = [layer.self_attn for layer in layers if layer.self_attn.is_kv_shared_layer]
    attention, rows = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def noted(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        if module is first:
            rows.append(query.shape[2])
        return attention(module, query, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = noted
    try:
        yield rows
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]  # what is beneath is the library's


def prompt(kind: str, device: Any, *, tokens: int = 24) -> dict[str, Any]:
    """A prompt of text: ``one``, or a ``batch`` of three, with padding on the ``left`` or on the ``right``."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(3, 240, (1 if kind == "one" else 3, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row, missing in ((1, tokens // 2), (2, tokens // 3)):
        if kind == "left":
            mask[row, :missing] = 0
        if kind == "right":
            mask[row, -missing:] = 0
    ids = ids.masked_fill(mask == 0, 0)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def media(kind: str, workspace: Any) -> dict[str, Any]:
    """A prompt with an ``image``, a ``sound`` or ``both``."""
    batch = workspace.inputs()
    left_out = {"image": "input_features", "sound": "image"}.get(kind)
    return batch if left_out is None else tiny.without(batch, left_out)


def assert_same(one: Any, other: Any) -> None:
    """Outputs of ``generate``: the same tokens, the same bits of logits."""
    import torch

    assert torch.equal(one.sequences, other.sequences)
    assert len(one.logits) == len(other.logits) > 0
    assert all(map(torch.equal, one.logits, other.logits))
