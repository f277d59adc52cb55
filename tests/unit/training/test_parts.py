"""What ``train_fast`` turns on by itself, what it says, and that each part can be named off and undone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.unit.memory.models import VARIANTS

pytest.importorskip("transformers.modeling_layers")
import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._gemma4.models import build
from gemma4_compat._plan import training
from gemma4_compat._plan.training_step import Step
from gemma4_compat._training import loss, mlp, parts
from gemma4_compat._training.captured import layers
from tests.helpers import without
from tests.patches.training.parts import only
from tests.patches.training.test_transformers_chunked_loss import batch

#: Bytes that a plan counts for a step by windows with the loss in chunks: the backward pass with Adam's states, and
#: LoRA's weights.
PLANNED = {
    ("E2B", 4096): (1_604_442_112 + 193_265_664, 96_632_832),
    ("E2B", 16_384): (6_565_156_864 + 193_265_664, 96_632_832),
    ("E4B", 4096): (2_185_227_264 + 279_052_288, 139_526_144),
    ("E4B", 16_384): (8_927_603_712 + 279_052_288, 139_526_144),
    ("12B", 4096): (3_022_637_056 + 524_550_144, 262_275_072),
    ("12B", 16_384): (12_484_790_272 + 524_550_144, 262_275_072),
    ("31B", 4096): (4_950_020_096 + 979_435_520, 489_717_760),
    ("31B", 16_384): (19_988_566_016 + 979_435_520, 489_717_760),
}


def said(caplog: pytest.LogCaptureFixture, model: Any, **named: Any) -> str:
    """The line that ``train_fast`` logs."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        assert gemma4_compat.train_fast(model, **named) is model
    (line,) = (one.getMessage() for one in caplog.records)
    return str(line)


def left(model: Any) -> set[tuple[str, str]]:
    return {(item.kind, item.name) for item in gemma4_compat.statistics(model).attached}


def test_one_line_says_what_is_on(workspace: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = workspace.load_text()
    assert said(caplog, model) == (
        "train_fast: on: the loss in chunks (outputs.logits is None), sliding layers by windows, attention by "
        "products, decoder layers as CUDA graphs in batches of up to 2,048 tokens; not MLPs in chunks: 2,048 tokens "
        "are one chunk."
    )
    assert said(caplog, model, max_tokens=4096, loss=False, windows=False, products=False, graphs=False) == (
        "train_fast: on: nothing; not MLPs in chunks: the model is on cpu."
    )
    assert said(caplog, model, mlp=7, products=False, graphs=False) == (
        "train_fast: on: the loss in chunks (outputs.logits is None), MLPs in chunks, sliding layers by windows."
    )


@pytest.mark.parametrize("named", [{}, {"loss": False, "mlp": 7}, {"graphs": False}], ids=str)
def test_undoing_it_leaves_nothing(workspace: Any, named: dict[str, Any]) -> None:
    model = workspace.load_text().train()
    given, before = batch(workspace, text_only=True), left(model)
    right = model(**given).logits
    gemma4_compat.train_fast(model, **named)
    assert left(model) > before
    model(**given)
    gemma4_compat.train_fast(model, enabled=False)
    assert left(model) == before
    assert model(**given).logits.equal(right)


def test_what_is_named_off_stays_off(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GEMMA4_COMPAT_ENABLE says; and that counts again after the undoing."""
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", ",".join((loss.ID, mlp.ID, windows.ID)))
    model, given = only(workspace.load_text().train()), batch(workspace, text_only=True)
    assert model(**given).logits is not None
    text = model.model
    attention = text.layers[0].self_attn
    assert windows._asked(attention) == (False, False)
    assert windows._asked(attention.eval()) == (True, True), "prompts are as for the process"
    gemma4_compat.train_fast(model, enabled=False)
    assert model(**given).logits is None
    assert windows._asked(attention.train()) == (True, True)


def test_each_call_states_everything(workspace: Any) -> None:
    model = workspace.load_text().train()
    only(model, mlp=7, windows=True)
    only(model, loss=True)
    names = {name for _, name in left(model)}
    assert attached.CHUNKED_NORM not in names
    assert windows._asked(model.model.layers[0].self_attn) == (False, False)
    assert vars(model)[attached.CHUNKED_LOSS] == "training"


def test_windows_awake_with_the_first_long_text_of_a_training(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of training mode a text has to be longer."""
    asked: list[bool] = []
    monkeypatch.setattr(windows, "least", lambda _device, *, enabled: asked.append(enabled) or 1 << 20)
    model, given = only(workspace.load_text(), windows=True), batch(workspace, text_only=True)
    with torch.no_grad():
        model.train()(**given)
        model.eval()(**given)
    assert list(dict.fromkeys(asked)) == [True, False]  # once more for each layer, if another test woke them


@pytest.mark.parametrize("part", ["loss", "mlp", "windows", "products"])
def test_a_patch_that_is_off(workspace: Any, caplog: pytest.LogCaptureFixture, part: str) -> None:
    """By itself the part is left out, and the line says why; by name it is an error, and nothing has changed."""
    model = workspace.load_text()
    patch, before = parts._IDS[part], left(model)
    with without(patch):
        if part != "mlp":
            assert f"the patch {patch} is " in said(caplog, model)
        gemma4_compat.train_fast(model, enabled=False)
        with pytest.raises(Gemma4CompatError, match=f"got {part}=True, but the patch {patch} is "):
            only(model, **{part: True})
        assert left(model) == before


@pytest.mark.parametrize(("part", "value"), [("loss", "never"), ("mlp", 0), ("windows", 1), ("products", None)])
def test_values_that_make_no_sense(workspace: Any, part: str, value: Any) -> None:
    with pytest.raises(Gemma4CompatError, match=f"got {part}={value!r}; it is"):
        gemma4_compat.train_fast(workspace.load_text(), **{part: value})


@pytest.mark.parametrize("variant", [one for one in VARIANTS if (one, 4096) in PLANNED])
def test_the_formula_is_a_little_above_plans(variant: str) -> None:
    model = build.on_meta(variant)[0].requires_grad_(False)
    for tokens in (4096, 16_384):
        planned, adapter = PLANNED[variant, tokens]
        assert planned <= parts.step(model, tokens) + 3 * adapter <= 1.12 * planned, tokens


@pytest.mark.full
@pytest.mark.parametrize(("variant", "tokens"), [one for one in PLANNED if one[0] in VARIANTS], ids=str)
def test_plans_count_what_is_recorded(variant: str, tokens: int) -> None:
    step = Step(max_length=tokens, padding=False, chunked_loss=True, sliding_windows=True)
    found = training._measure(variant, "4bit", step)
    assert (found.backward + found.optimizer, found.adapter) == PLANNED[variant, tokens]


@pytest.mark.parametrize(("missing", "chunked"), [(0, False), (1, True)])
def test_memory_asks_for_chunked(
    workspace: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, missing: int, chunked: bool
) -> None:
    """Graphs then serve short batches only. What PyTorch holds and does not use is free."""
    model = workspace.load_text()
    free = parts.step(model, 8192) + parts.MARGIN - missing
    monkeypatch.setattr(module_hooks, "hook_device", lambda *_args, **_named: torch.device("cuda", 0))
    for name, value in (("memory_reserved", 3 << 20), ("memory_allocated", 1 << 20), ("mem_get_info", None)):
        found = (free - (2 << 20), 0) if value is None else value
        monkeypatch.setattr(torch.cuda, name, lambda _device, found=found: found)
    line = said(caplog, model, max_tokens=8192)
    assert ("MLPs in chunks, " in line) is chunked
    assert ("a step of 8,192 tokens takes about" in line) is not chunked
    most = layers.MAX_TOKENS if chunked else 8192
    assert f"graphs in batches of up to {most:,} tokens" in line
    assert vars(layers.decoder_layers(model)[0])[attached.TRAINING]._max_tokens == most
    gemma4_compat.train_fast(model, enabled=False)
