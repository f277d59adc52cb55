"""F11: ``embed_tokens`` offloaded, in every way its weight is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat._offload import host_memory
from gemma4_compat.patches.offload.transformers_offloaded_embedding import PATCH
from tests.patches.promise import Promise

EMBEDDING, PER_LAYER = "model.language_model.embed_tokens", "model.language_model.embed_tokens_per_layer"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"[Tt]ensor on device meta is not on the expected device"


def split(workspace: Any, *offloaded: str, quantization: str | None = None) -> Any:
    model = workspace.load(quantization)
    placement = tiny.device_map(model, "none", main=workspace.main, offloaded=workspace.offloaded)
    return workspace.dispatch_map(model, placement | dict.fromkeys(offloaded, workspace.offloaded))


def test_inputs_embeds_are_recognized_in_the_whole_table(workspace: Any) -> None:
    import torch

    seen = []
    for model in (workspace.load(), split(workspace, EMBEDDING, PER_LAYER, "lm_head")):
        ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
        with torch.no_grad():
            embeds = model.get_input_embeddings()(ids)
            seen.append([model(inputs_embeds=embeds).logits for _ in range(3)])
            seen[-1].append(model(input_ids=ids).logits)
    whole, other = seen
    assert all(torch.equal(a, b) for a, b in zip(whole, other))


def test_the_padding_row_is_read_where_rows_are_looked_up(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from host memory ends the capture of a step."""
    model = split(workspace, EMBEDDING, "lm_head")
    expected = workspace.outputs(model)

    def refused(*_: Any) -> None:
        raise AssertionError("it is copied")

    monkeypatch.setattr(host_memory, "cast", refused)
    assert difference(expected, workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("adapter", ["language", "all"])
def test_with_an_adapter(workspace: Any, one_device: Callable[..., Any], adapter: str) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(split(workspace, EMBEDDING, "lm_head"), workspace.adapter(adapter))
    assert difference(one_device(None, adapter), workspace.outputs(model)) == 0.0
    assert model.get_submodule(f"base_model.model.{EMBEDDING}").weight.device.type == "meta"


def test_an_adapter_on_the_embedding_itself(workspace: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False)
    get_peft_model(workspace.load(), config).save_pretrained(tmp_path)
    reference = workspace.outputs(PeftModel.from_pretrained(workspace.load(), tmp_path))
    model = PeftModel.from_pretrained(split(workspace, EMBEDDING), tmp_path)
    assert difference(reference, workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_training_steps(workspace: Any, checkpointing: bool) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    steps = []
    for base in (workspace.load(), split(workspace, EMBEDDING, PER_LAYER, "lm_head")):
        torch.manual_seed(3)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["language"])).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        batch = tiny.inputs(workspace.main)
        model(**batch, labels=batch["input_ids"]).loss.backward()
        steps.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    whole, other = steps
    assert whole
    assert whole.keys() == other.keys()
    assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_after_an_error_in_a_forward_the_next_one_is_right(workspace: Any, one_device: Callable[..., Any]) -> None:
    model = split(workspace, EMBEDDING, "lm_head")
    batch = tiny.inputs(workspace.main)
    hooks = model.get_submodule(EMBEDDING)._forward_hooks
    before = dict(hooks)
    with pytest.raises(RuntimeError):  # in the vision tower, after the tokens were embedded
        model(**{**batch, "pixel_values": batch["pixel_values"][..., :-1]})
    assert hooks == before
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
