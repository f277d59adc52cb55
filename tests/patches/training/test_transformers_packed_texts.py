"""F115: texts packed into one row are computed as each by itself; what is not packed is upstream's, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny_models
from gemma4_compat.patches.training.transformers_packed_texts import PATCH
from tests.helpers import without
from tests.patches.promise import Promise
from tests.patches.training.test_transformers_chunked_loss import CLASSES, built

#: Tokens of packed texts: the window is 8 tokens.
LENGTHS = (5, 12, 1, 1, 9)
#: Of the largest logit, in float32. A text is packed with products of other shapes, which round differently: by up to
#: 1.46e-5 for images of several texts, of 40 models with random weights.
BOUND = 2e-5


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the logits of a text packed after another are off by \d"
    exact = False  # the logits differ by rounding


def texts(model: Any, lengths: Sequence[int] = LENGTHS, seed: int = 3) -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 240, (1, length), generator=generator).to(model.device) for length in lengths]


def packed(parts: Sequence[Any], before: int = 0, after: int = 0) -> dict[str, Any]:
    """One row of these texts, with padding; its positions are what collators and ``generate`` give padding."""
    import torch

    device = parts[0].device
    positions = torch.cat([torch.arange(part.shape[1], device=device) for part in parts])[None]
    pad = torch.nn.functional.pad
    sides = (before, after)
    mask = pad(torch.ones_like(positions), sides)
    return {
        "input_ids": pad(torch.cat(list(parts), dim=1), sides),
        "position_ids": pad(positions, sides, value=1),
        "attention_mask": mask,
    }


def forward(model: Any, **given: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**given).logits.float()


def off(model: Any, parts: Sequence[Any], found: Any, at: int = 0) -> float:
    """How far the logits of these texts, in ``found`` from ``at`` on, are from those of each by itself."""
    worst = 0.0
    for part in parts:
        alone = forward(model, input_ids=part)
        difference = (found[:, at : at + part.shape[1]] - alone).abs().max() / alone.abs().max()
        worst, at = max(worst, difference.item()), at + part.shape[1]
    return worst


def two_rows(model: Any) -> tuple[dict[str, Any], list[list[Any]]]:
    """Two rows that are packed in different ways, the second with padding after it."""
    import torch

    rows = [texts(model), texts(model, (9, 8, 4), seed=4)]
    given = [packed(rows[0]), packed(rows[1], after=sum(LENGTHS) - 21)]
    return {name: torch.cat([each[name] for each in given]) for name in given[0]}, rows


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CLASSES)
def test_every_class(workspace: Any, tmp_path: Path, name: str | None, implementation: str) -> None:
    from transformers import DynamicCache

    model = built(workspace, name, tmp_path)[0].float()
    model.set_attn_implementation(implementation)
    parts = texts(model)
    row = packed(parts)
    plain = {key: value for key, value in row.items() if key != "attention_mask"}
    calls: list[dict[str, Any]] = [row, plain, {**row, "use_cache": False}, {**plain, "use_cache": False}]
    calls.append({**plain, "past_key_values": DynamicCache()})
    assert [each for each in calls if off(model, parts, forward(model, **each)) > BOUND] == []
    assert off(model, parts, forward(model, **packed(parts, before=3)), 3) <= BOUND
    given, rows = two_rows(model)
    found = forward(model, **given)
    assert max(off(model, each, found[[number]]) for number, each in enumerate(rows)) <= BOUND


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("name", ["26B-A4B", "31B", "unified"])
def test_images_of_several_texts(workspace: Any, tmp_path: Path, name: str, mask: bool) -> None:
    """One ends with an image, and the next begins with one: they are two."""
    import torch

    if name == "unified":
        pytest.importorskip("transformers.models.gemma4_unified", reason="this transformers has no 12B")
        model = tiny_models.unified_model().to(workspace.main)
    else:
        model = built(workspace, name, tmp_path)[0].float()
    parts = texts(model, (9, 11, 6))
    kinds = [torch.zeros_like(part) for part in parts]
    kinds[0][:, 5:], kinds[1][:, :4], kinds[1][:, 6:9] = 1, 1, 2
    row = packed(parts)
    if not mask:
        del row["attention_mask"]
    found, at = forward(model, **row, mm_token_type_ids=torch.cat(kinds, dim=1)), 0
    for part, kind in zip(parts, kinds, strict=True):
        alone = forward(model, input_ids=part, mm_token_type_ids=kind)
        assert (found[:, at : at + part.shape[1]] - alone).abs().max() <= BOUND * alone.abs().max()
        at += part.shape[1]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_the_sum_of_those_of_each_text(workspace: Any, checkpointing: bool) -> None:
    import torch

    model = workspace.load().float().train()
    parts = texts(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = []
    for calls in ([packed(parts)], [{"input_ids": part} for part in parts]):
        model.zero_grad()
        for given in calls:
            model(**given).logits.square().sum().backward()
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, right in gradients[1].items():
        assert (gradients[0][name] - right).norm() <= 1e-3 * right.norm() + 1e-6, name
    assert any(bool(torch.count_nonzero(each)) for each in gradients[1].values())


def _not_packed(model: Any) -> dict[str, dict[str, Any]]:
    import torch

    ids = texts(model, (14,))[0]
    ones, count = torch.ones_like(ids), torch.arange(14, device=ids.device)[None]
    left = torch.nn.functional.pad(torch.ones_like(ids[:, 4:]), (4, 0))
    hole = ones.clone()
    hole[:, 5:8] = 0
    later = count.clone()
    later[:, 7:] += 5
    back = count.clone()
    back[:, 7:] -= 3
    causal = torch.ones(14, 14, dtype=torch.bool, device=ids.device).tril()[None, None]
    again = torch.cat([count[:, :7]] * 2, dim=1)
    return {
        "padding": {"attention_mask": left, "position_ids": (left.cumsum(1) - 1).masked_fill(left == 0, 1)},
        "padding at 0": {"attention_mask": left, "position_ids": (left.cumsum(1) - 1).clamp(min=0)},
        "a hole": {"attention_mask": hole, "position_ids": count},
        "a hole, counted": {"attention_mask": hole, "position_ids": (hole.cumsum(1) - 1).masked_fill(hole == 0, 1)},
        "a gap": {"attention_mask": ones, "position_ids": later},
        "back": {"attention_mask": ones, "position_ids": back},
        "groups": {"attention_mask": ones, "position_ids": count // 2},
        "a mask of one's own": {"attention_mask": causal, "position_ids": again},
    }


def test_what_is_not_packed_is_upstreams(workspace: Any) -> None:
    import torch

    model = workspace.load_text().float()
    ids, calls = texts(model, (14,))[0], _not_packed(model)
    found = {name: forward(model, input_ids=ids, **given) for name, given in calls.items()}
    generated = model.generate(ids, **calls["padding"], max_new_tokens=4, do_sample=False)
    with without(PATCH.id):
        for name, given in calls.items():
            assert torch.equal(forward(model, input_ids=ids, **given), found[name]), name
        assert torch.equal(model.generate(ids, **calls["padding"], max_new_tokens=4, do_sample=False), generated)


def test_a_continued_cache_is_upstreams(workspace: Any) -> None:
    """Positions that begin again after a cache belong to no text of this row."""
    import torch
    from transformers import DynamicCache

    model = workspace.load_text().float()
    ids, row = texts(model, (6,))[0], packed(texts(model, (4, 5)))

    def found() -> Any:
        cache = DynamicCache()
        forward(model, input_ids=ids, past_key_values=cache)
        mask = torch.ones(1, 15, dtype=torch.long, device=ids.device)
        return forward(model, **{**row, "attention_mask": mask}, past_key_values=cache)

    here = found()
    with without(PATCH.id):
        assert torch.equal(found(), here)


def test_other_models_are_left_alone(workspace: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256)).eval()
    row = packed(texts(model))
    here = forward(model, **row)
    with without(PATCH.id):
        assert torch.equal(forward(model, **row), here)


@pytest.mark.parametrize("cached", [False, True])
def test_compiled(workspace: Any, cached: bool) -> None:
    import torch

    model = workspace.load_text().float()
    parts = texts(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=not cached)
    try:
        assert off(model, parts, forward(compiled, **packed(parts), use_cache=cached)) <= BOUND
        whole = texts(model, (sum(LENGTHS),))
        assert off(model, whole, forward(compiled, **packed(whole), use_cache=cached)) <= BOUND
    finally:
        torch._dynamo.reset()


def test_a_static_cache_is_upstreams(workspace: Any) -> None:
    """Its keys are more than the tokens. ``generate`` fills it, and packs nothing."""
    import torch
    from transformers import StaticCache

    model = workspace.load_text().float()
    row = packed(texts(model))

    def found() -> Any:
        cache = StaticCache(config=model.config, max_cache_len=40)
        return forward(model, **row, past_key_values=cache)

    here = found()
    with without(PATCH.id):
        assert torch.equal(found(), here)
