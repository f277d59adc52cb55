"""F123: attentions that are asked for are those of eager attention, and asking changes no logit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.stand_ins import flash
from gemma4_compat.patches.training.transformers_attention_weights import PATCH
from tests.helpers import without
from tests.patches.promise import Promise
from tests.patches.training.test_transformers_chunked_loss import CLASSES, built

BOUND = 1e-4  # weights are at most 1; float32
ASKED = {"output_attentions": True}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"0 tensors of attention weights for \d+ layers"


def same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= BOUND


def eager(model: Any) -> Any:
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def prompt(model: Any) -> dict[str, Any]:
    """Two rows, longer than the window; one is padded on the left."""
    import torch

    ids = torch.randint(3, 240, (2, 24), generator=torch.Generator().manual_seed(5)).to(model.device)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", CLASSES)
def test_every_class(workspace: Any, tmp_path: Path, name: str | None) -> None:
    import torch

    model = built(workspace, name, tmp_path)[0].float()
    right, whole = eager(model), prompt(model)
    with torch.no_grad():
        for given in (whole, {"input_ids": whole["input_ids"], "use_cache": False}):
            found = model(**given, **ASKED)
            same(found.attentions, right(**given, **ASKED).attentions)
            assert torch.equal(found.logits, model(**given).logits)
            assert model(**given).attentions is None


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(workspace: Any, cache: str | None) -> None:
    import torch

    model = workspace.load_text().float()
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options |= {"cache_implementation": cache, "disable_compile": True}
    found = model.generate(**prompt(model), **options, **ASKED)
    for one, other in zip(found.attentions, eager(model).generate(**prompt(model), **options, **ASKED).attentions):
        same(one, other)
    with without(PATCH.id):  # from 5.24 on the layers of a prompt are sliced unless attentions are asked for
        plain = model.generate(**prompt(model), **options, **ASKED)
    assert not any(plain.attentions)
    assert all(map(torch.equal, plain.logits, found.logits))


def test_towers(workspace: Any) -> None:
    import torch

    model = workspace.load().float()
    batch = tiny.inputs(workspace.main, variant=workspace.variant)
    names = ("pixel_values", "image_position_ids")
    if getattr(model.model, "vision_tower", None) is None:
        pytest.skip("this model has no vision tower")
    with torch.no_grad():
        found, right = (each.model.vision_tower(*map(batch.get, names), **ASKED) for each in (model, eager(model)))
    same(found.attentions, right.attentions)


def test_a_split_model(workspace: Any) -> None:
    """The bits of the same weights on one device."""
    import torch

    batch = tiny.inputs(workspace.main, text_only=True)
    with torch.no_grad():
        right, found = (model(**batch, **ASKED).attentions for model in (workspace.load(), workspace.split()))
    assert len(found) == len(right) > 0
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training(workspace: Any, checkpointing: bool) -> None:
    """Inside a checkpoint without gradients: gradients of weights are those of the same step without asking."""
    import torch

    model = workspace.load().float().train()
    batch = tiny.inputs(workspace.main, text_only=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = []
    for asked in ({}, ASKED):
        model.zero_grad()
        output = model(**batch, labels=batch["input_ids"], use_cache=False, **asked)
        if asked:
            assert len(output.attentions) == model.config.get_text_config().num_hidden_layers
            assert output.attentions[0].requires_grad != checkpointing
        output.loss.backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_gradients_through_the_weights(workspace: Any) -> None:
    model = workspace.load_text().float()
    gradients = []
    for each in (model, eager(model)):
        ids = prompt(each)["input_ids"]
        sum(one[..., 0].sum() for one in each(input_ids=ids, **ASKED).attentions).backward()
        gradients.append({name: one.grad for name, one in each.named_parameters() if one.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, right in gradients[1].items():
        assert (gradients[0][name] - right).norm() <= 1e-3 * right.norm() + 1e-5, name


@pytest.mark.parametrize("given", ["padding", "packed"])
def test_flash(workspace: Any, tmp_path: Path, given: str) -> None:
    """Sliding layers run the kernel, which hides what is outside the window, padding, and other texts."""
    import torch

    tiny_models.build_checkpoint(tmp_path, full_width=512)
    with flash.kernel() as (name, dtype), torch.no_grad():
        right, model = (
            tiny.load(tmp_path, device=workspace.main, dtype=dtype, attn_implementation={"text_config": each})
            for each in ("eager", name)
        )
        batch = prompt(model)
        if given == "packed":
            positions = torch.cat([torch.arange(9), torch.arange(15)])[None].to(model.device)
            batch = {"input_ids": batch["input_ids"][:1], "position_ids": positions, "use_cache": False}
        found, expected = (each(**batch, **ASKED).attentions for each in (model, right))
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    off = [(one - other).abs().amax(dim=(1, 3))[seen].max() for one, other in zip(found, expected, strict=True)]
    assert max(off) <= (BOUND if dtype == torch.float32 else 0.1)


@pytest.mark.full  # it compiles
def test_flex(workspace: Any) -> None:
    import torch

    model = workspace.load_text().float()
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        same(model(**prompt(model), **ASKED).attentions, eager(model)(**prompt(model), **ASKED).attentions)


def test_other_models_are_left_alone(workspace: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256)).eval()
    gemma = workspace.load_text()
    with torch.no_grad():
        assert gemma(**prompt(gemma), **ASKED).attentions  # from here on layers are looked at
        assert model(torch.ones(1, 4, dtype=torch.long), **ASKED).attentions == ()
