"""Continuous batching: each text has the logits of its own ``generate``, whatever joins or leaves meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import gemma4_compat
from gemma4_compat._gemma4.quantization import expert_storage, experts
from gemma4_compat._generation import continuous
from gemma4_compat._generation.prefix_cache import session
from gemma4_compat._graphs import decoder
from gemma4_compat._kernels.match import custom
from gemma4_compat._lab import tiny, tiny_models
from tests.unit.kernels.by_rows import ByWidth

pytestmark = pytest.mark.usefixtures("tapes")


@pytest.fixture
def kernels_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "CustomKernels", ByWidth)
    monkeypatch.setattr(custom, "unsupported_reason", lambda _device: None)


def with_experts(workspace: Any, quantization: str | None = "4bit-double") -> Any:
    """A tiny 26B-A4B in bf16, with its experts in 4 bits."""
    pytest.importorskip("bitsandbytes")
    model = tiny.load(workspace.cached(tiny_models.build_moe_checkpoint), device=workspace.main).eval()
    for module in experts.all_experts(model).values() if quantization else ():
        expert_storage.quantize_module(module, tiny.quantization_config(quantization))
    return model


def loaded(workspace: Any, variant: str | None) -> Any:
    if variant == "12B":
        pytest.importorskip("transformers.models.gemma4_unified")
    if variant == "26B-A4B":
        model = with_experts(workspace)
    else:
        folder = workspace.cached(tiny_models.build_checkpoint, variant=variant)
        model = tiny.load(folder, device=workspace.main).eval()
    model.generation_config.eos_token_id = None
    gemma4_compat.decode_fast(model, reuse_prefix=True)
    return model


def greedy(model: Any, ids: Any, tokens: int) -> Any:
    """Logits of each token, [tokens, vocabulary]."""
    options = {"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return torch.cat(model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options).logits)


class Text:
    """A text of a batch, and what ``generate`` would have said."""

    def __init__(self, model: Any, batch: continuous.Batch, ids: Any, tokens: int) -> None:
        session.of(model).take()
        self.expected = greedy(model, ids, tokens)
        session.of(model).take()
        self.logits = [greedy(model, ids, 1)[0]]
        self.conversation = session.of(model).take()
        self.row = batch.join(self.conversation.layers, ids.shape[1])

    @property
    def token(self) -> int:
        return int(self.logits[-1].argmax())

    @property
    def is_whole(self) -> bool:
        return len(self.logits) == len(self.expected)


def decoded(model: Any, rows: int, context: int, prompts: list[tuple[int, int, int]]) -> list[Text]:
    """Texts of so many tokens, to which others are added, that join before a step of this number, or later."""
    batch = continuous.Batch(model, rows, context)
    draw = torch.Generator().manual_seed(1)
    found: list[Text] = []
    here: list[Text] = []
    step = 0
    while len(found) < len(prompts) or here:
        while len(found) < len(prompts) and prompts[len(found)][2] <= step and len(here) < rows:
            length, tokens, _ = prompts[len(found)]
            ids = torch.randint(5, 60, (1, length), generator=draw).to(model.device)
            found.append(Text(model, batch, ids, tokens))
            here.append(found[-1])
            assert found[-1].row == len(here) - 1
        if here:
            tokens = torch.tensor([text.token for text in here], device=model.device)
            logits = batch.step(tokens, "all are compared")
            for text, row in zip(here, logits):
                text.logits.append(row)
        for text in [text for text in here if text.is_whole]:
            at = here.index(text)
            batch.leave(at)
            last = here.pop()
            if last is not text:
                here[at] = last
        step += 1
    return found


#: Tokens of a prompt, of its answer, and the step before which it joins: below, at and far beyond a window of 8.
PROMPTS = [(3, 5, 0), (8, 9, 0), (25, 4, 2), (5, 12, 3), (40, 5, 3), (7, 3, 5), (12, 2, 20), (30, 4, 20)]


@pytest.mark.usefixtures("kernels_by_row")
@pytest.mark.parametrize(
    "variant, spare",
    [(None, 256), (None, 3), pytest.param("31B", 3, marks=pytest.mark.full), ("12B", 3), ("26B-A4B", 3)],
)
def test_each_row_has_the_bits_of_the_text_alone(
    workspace: Any, monkeypatch: pytest.MonkeyPatch, variant: str | None, spare: int
) -> None:
    monkeypatch.setattr(continuous, "_SPARE", spare)  # with 3, all rows are moved back every few tokens
    model = loaded(workspace, variant)
    assert continuous.unsupported_reason(model) is None
    with torch.no_grad():
        texts = decoded(model, 4, 48, PROMPTS)
    for text in texts:
        assert torch.equal(torch.stack(text.logits), text.expected.to(text.logits[-1].dtype))
    assert decoder.statistics(model).replayed > 20


@pytest.mark.full
@pytest.mark.usefixtures("kernels_by_row")
@pytest.mark.parametrize("seed", range(4))
def test_at_random(workspace: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(continuous, "_SPARE", draw.choice([1, 2, 7, 50]))
    model, at, prompts = loaded(workspace, None), 0, []
    for _ in range(12):
        at += draw.choice([0, 0, 1, 3, 12])
        prompts.append((draw.randint(1, 60), draw.randint(2, 30), at))
    with torch.no_grad():
        texts = decoded(model, draw.choice([3, 5, 8, 20]), 96, prompts)
    assert [torch.equal(torch.stack(text.logits), text.expected) for text in texts] == [True] * len(texts)


@pytest.mark.usefixtures("kernels_by_row")
def test_rows_are_those_of_a_text_that_is_read_at_once(workspace: Any) -> None:
    """What a next turn continues: the text of the answer's end is in the cache as if one ``generate`` had made it."""
    model = loaded(workspace, None)
    ids = torch.arange(5, 17)[None]
    with torch.no_grad():
        batch = continuous.Batch(model, 2, 48)
        text = Text(model, batch, ids, 6)
        for _ in range(5):
            text.logits.append(batch.step(torch.tensor([text.token]), "all")[0])
        found = batch.rows_of(0, 17)
        greedy(model, ids, 6)
    expected = session.of(model).take().layers
    for index, own in expected.items():
        other = found[index].between(own.start, own.end)
        assert torch.equal(own.keys, other.keys)
        assert torch.equal(own.values, other.values)


def test_where_rows_would_differ(workspace: Any) -> None:
    model = tiny.load(workspace.cached(tiny_models.build_checkpoint), device=workspace.main)
    assert "PyTorch's kernels" in str(continuous.unsupported_reason(model))
    gemma4_compat.decode_fast(model)
    assert continuous.unsupported_reason(model) == custom.unsupported_reason(model.device)
