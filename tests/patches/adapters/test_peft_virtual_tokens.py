"""peft-virtual-tokens: prompt tuning, P-tuning, multitask prompt tuning and CPT of E2B and E4B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.models import per_layer
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.adapters.peft_virtual_tokens import PATCH
from tests.patches.promise import Promise

VIRTUAL, NEW = 3, 4
KINDS: dict[str, dict[str, Any]] = {
    "PromptTuningConfig": {},
    "PromptEncoderConfig": {"encoder_hidden_size": 16},
    "MultitaskPromptTuningConfig": {"num_tasks": 2, "num_ranks": 1},
    "CPTConfig": {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [2, 3, 4]},
}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: It seems like you tried to call `forward` from `inputs_embeds`"


def base(workspace: Any, variant: str = "E2B") -> Any:
    return tiny.load(workspace.cached(tiny_models.build_checkpoint, variant=variant, width=96), device=workspace.main)


def tuned(model: Any, kind: str = "PromptTuningConfig") -> Any:
    """``model`` with virtual tokens that are far from any token's embedding."""
    import peft
    import torch

    torch.manual_seed(0)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", **{"num_virtual_tokens": VIRTUAL, **KINDS[kind]})
    found = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for value in found.parameters():
            if value.requires_grad:
                value.add_(0.1 * torch.randn_like(value))
    return found


def tasks(model: Any, ids: Any) -> dict[str, Any]:
    import torch

    multitask = model.active_peft_config.peft_type == "MULTITASK_PROMPT_TUNING"
    return {"task_ids": torch.ones(len(ids), dtype=torch.long, device=ids.device)} if multitask else {}


def by_hand(model: Any, ids: Any, **batch: Any) -> Any:
    """The output of the base model for what a forward of ``model`` stands for."""
    import torch

    inner = model.get_base_model()
    virtual = getattr(model.active_peft_config, "cpt_token_ids", None) or [0] * VIRTUAL
    tokens = torch.cat([ids.new_tensor([virtual]).expand(len(ids), -1), ids], dim=1)
    embeds = inner.get_input_embeddings()(ids)
    prompts = model.get_prompt(len(ids), **tasks(model, ids)).to(embeds.dtype)
    return inner(
        inputs_embeds=torch.cat([prompts, embeds], dim=1),
        per_layer_inputs=per_layer.inputs_of(inner, tokens),
        attention_mask=torch.ones_like(tokens),
        **batch,
    )


def prompts(workspace: Any, *, text_only: bool = True, rows: int = 2) -> dict[str, Any]:
    """A batch of this many rows; those of media are one after another."""
    import torch

    batch = tiny.inputs(workspace.main, text_only=text_only)
    del batch["attention_mask"]
    return {name: torch.cat([value] * rows) for name, value in batch.items()}


def logits(model: Any, batch: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        mask = torch.ones_like(batch["input_ids"])
        return model(**batch, attention_mask=mask, **tasks(model, batch["input_ids"])).logits


@pytest.mark.parametrize("variant", ["E2B", "E4B"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_is_the_base_models(workspace: Any, kind: str, variant: str) -> None:
    import torch

    model, batch = tuned(base(workspace, variant), kind), prompts(workspace)
    with torch.no_grad():
        expected = by_hand(model, batch["input_ids"]).logits
    assert torch.equal(logits(model, batch), expected)
    assert torch.isfinite(expected).all()


def test_virtual_tokens_before_an_image_and_a_sound(workspace: Any) -> None:
    import torch

    model, batch = tuned(base(workspace)), prompts(workspace, text_only=False)
    others = {name: value for name, value in batch.items() if name not in ("input_ids", "mm_token_type_ids")}
    with torch.no_grad():
        expected = by_hand(model, batch["input_ids"], **others).logits
    assert torch.equal(logits(model, batch), expected)


@pytest.mark.parametrize("variant", ["12B", "26B-A4B", "31B"])
def test_the_tokens_of_an_image_stay_those_of_the_image(workspace: Any, variant: str) -> None:
    """Without the patch, and silently, the mask is that of an image as many tokens further left."""
    import torch

    if variant == "12B":
        pytest.importorskip("transformers.models.gemma4_unified")
    model = tuned(base(workspace, variant))
    inner, batch = model.get_base_model(), tiny.inputs(workspace.main, variant=variant)
    embeds = inner.get_input_embeddings()(batch["input_ids"])
    others = {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}
    others["mm_token_type_ids"] = torch.nn.functional.pad(batch["mm_token_type_ids"], (VIRTUAL, 0))
    with torch.no_grad():
        whole = torch.cat([model.get_prompt(1).to(embeds.dtype), embeds], dim=1)
        expected = inner(inputs_embeds=whole, attention_mask=whole.new_ones(whole.shape[:2]), **others).logits
        assert torch.equal(model(**batch).logits, expected)
        options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True, "do_sample": False}
        assert torch.equal(model.generate(**batch, **options).logits[0], expected[:, -1].float())


@pytest.mark.parametrize("kind", KINDS)
def test_a_generate_is_a_forward_for_each_token(workspace: Any, kind: str) -> None:
    import torch

    model, batch = tuned(base(workspace).float(), kind), prompts(workspace)
    ids = batch["input_ids"]
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    options |= {"attention_mask": torch.ones_like(ids), "output_logits": True, **tasks(model, ids)}
    for more in ({}, {"num_beams": 2}):
        found = model.generate(input_ids=ids, **options, **more)
        if more:
            first = logits(model, batch)[:, -1].repeat_interleave(2, dim=0)
            assert torch.allclose(found.logits[0], first, atol=1e-4 * float(first.abs().max()))
            continue
        whole = logits(model, {"input_ids": found.sequences})[:, -NEW - 1 : -1]
        generated = torch.stack(found.logits, dim=1)
        assert torch.allclose(generated, whole, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_saved_and_loaded(workspace: Any, tmp_path: Path, kind: str) -> None:
    import torch
    from peft import PeftModel

    model, batch = tuned(base(workspace), kind), prompts(workspace)
    before = logits(model, batch)
    ids = batch["input_ids"]
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.5)
    model(**batch, attention_mask=torch.ones_like(ids), labels=ids, **tasks(model, ids)).loss.backward()
    trained = [value for value in model.parameters() if value.requires_grad]
    assert all(value.grad is not None for value in trained)
    assert any(value.grad.any() for value in trained)
    if kind != "CPTConfig":  # its loss is its own
        grads = [value.grad.clone() for value in trained]
        optimizer.zero_grad()
        labels = torch.cat([ids.new_full((len(ids), VIRTUAL), -100), ids], dim=1)
        by_hand(model, ids, labels=labels).loss.backward()
        assert all(map(torch.equal, grads, [value.grad for value in trained]))
    optimizer.step()
    after = logits(model, batch)
    assert not torch.equal(after, before)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base(workspace), tmp_path).eval()
    assert torch.equal(logits(loaded, batch), after)


@pytest.mark.parametrize("quantization", [None, "4bit"])
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_a_split_model(workspace: Any, kind: str, quantization: str | None) -> None:
    import torch

    batch = prompts(workspace, text_only=False)
    whole, split = tuned(workspace.load(quantization), kind), tuned(workspace.split(quantization), kind)
    assert torch.equal(logits(whole, batch), logits(split, batch))
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    options["attention_mask"] = torch.ones_like(batch["input_ids"])
    assert torch.equal(whole.generate(**batch, **options), split.generate(**batch, **options))
    grads = []
    for model in (whole, split):
        found = model(**batch, attention_mask=options["attention_mask"], labels=batch["input_ids"])
        found.loss.backward()
        grads.append([value.grad for value in model.parameters() if value.requires_grad])
    assert all(map(torch.equal, *grads))


def test_the_text_model_by_itself(workspace: Any) -> None:
    import torch

    model, batch = tuned(workspace.load_text()), prompts(workspace)
    with torch.no_grad():
        expected = by_hand(model, batch["input_ids"]).logits
    assert torch.equal(logits(model, batch), expected)


def test_embeddings_of_the_caller(workspace: Any) -> None:
    """The embeddings of tokens, and others with per-layer inputs of their own."""
    import torch

    model, batch = tuned(base(workspace)), prompts(workspace)
    ids, inner = batch["input_ids"], model.get_base_model()
    embeds = inner.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        assert torch.equal(model(inputs_embeds=embeds).logits, logits(model, batch))
        told = per_layer.inputs_of(inner, ids)
        assert torch.equal(model(inputs_embeds=embeds, per_layer_inputs=told).logits, logits(model, batch))


def test_a_model_without_per_layer_embeddings_is_left_to_peft(workspace: Any) -> None:
    import torch

    model, batch = tuned(base(workspace, "31B")), prompts(workspace)
    inner, ids = model.get_base_model(), batch["input_ids"]
    embeds = inner.get_input_embeddings()(ids)
    whole = torch.cat([model.get_prompt(len(ids)).to(embeds.dtype), embeds], dim=1)
    with torch.no_grad():
        expected = inner(inputs_embeds=whole, attention_mask=whole.new_ones(whole.shape[:2])).logits
        assert torch.equal(logits(model, batch), expected)


def test_an_adapter_that_inserts_nothing_is_left_to_peft(workspace: Any) -> None:
    import peft
    import torch

    model, batch = workspace.load(), prompts(workspace)
    expected = logits(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])), batch)
    with torch.no_grad():
        assert torch.equal(
            workspace.load()(**batch, attention_mask=torch.ones_like(batch["input_ids"])).logits, expected
        )
