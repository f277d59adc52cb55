"""F20: preparing a quantized model for training casts its norms and lets it grow by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.training.peft_kbit_dtypes import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"the per-layer embedding is torch\.float32; the model has \d\.\d its bytes"


def prepare(model: Any, **kwargs: Any) -> Any:
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(model, **{"use_gradient_checkpointing": False, **kwargs})


def dtypes(model: Any) -> dict[str, Any]:
    return {name: weight.dtype for name, weight in model.named_parameters(remove_duplicate=False)}


def is_rms_norm(model: Any, name: str) -> bool:
    return type(model.get_submodule(name.rpartition(".")[0])).__name__.endswith("RMSNorm")


@pytest.mark.parametrize("skip", [None, ["model.vision_tower", "model.audio_tower"]], ids=["towers-too", "towers-not"])
@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_norms_are_cast_and_nothing_else(workspace: Any, quantization: str, skip: list[str] | None) -> None:
    import torch

    model = tiny.load(workspace.checkpoint, quantization, device=workspace.main, skip_modules=skip)
    before, order = dtypes(model), [name for name, _ in model.named_parameters()]
    reference = workspace.outputs(model)
    assert prepare(model) is model
    after = dtypes(model)
    cast = {name for name in before if before[name] != after[name]}
    assert cast == {name for name in before if is_rms_norm(model, name)}
    assert {after[name] for name in cast} == {torch.float32}
    assert [name for name, _ in model.named_parameters()] == order
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert difference(reference, workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("offload", ["both", "towers"])
@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_split_model_gives_the_answers_of_one_device(
    workspace: Any, one_device: Callable[..., Any], quantization: str, offload: str
) -> None:
    model = prepare(workspace.split(quantization, offload))
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert dtypes(model) == dtypes(prepare(workspace.load(quantization)))
    meta = [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
    assert meta
    hooks = {name: module._hf_hook for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    for name in meta:
        module, _, own = name.rpartition(".")
        stored = (getattr(hooks[module], "hooks", None) or [hooks[module]])[-1].weights_map[own]
        assert stored.dtype == model.get_parameter(name).dtype, name


def test_experts_keep_their_dtype(workspace: Any) -> None:
    import torch
    from transformers.models.gemma4 import modeling_gemma4 as gemma4

    torch.manual_seed(0)
    shape = {**tiny_configs.text_shape(3), "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 4}
    shape |= {"top_k_experts": 2, "moe_intermediate_size": 64, "hidden_size_per_layer_input": 0}
    model = (
        tiny_models.randomized(gemma4.Gemma4ForCausalLM(gemma4.Gemma4TextConfig(**shape))).eval().to(workspace.main)
    )
    batch = tiny.inputs(workspace.main, text_only=True)
    model.is_loaded_in_4bit = True  # what bitsandbytes leaves unquantized is the same: these are no linears
    with torch.no_grad():
        right = model(**batch).logits
        prepare(model)
        assert torch.equal(model(**batch).logits, right)
    experts = {name: weight for name, weight in model.named_parameters() if weight.ndim == 3}
    assert len(experts) == 6
    assert {weight.dtype for weight in experts.values()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in experts.values())


def test_a_float16_model_computes_in_float32_and_keeps_the_per_layer_embedding(workspace: Any) -> None:
    import torch
    from transformers import Gemma4ForConditionalGeneration

    model = Gemma4ForConditionalGeneration.from_pretrained(
        workspace.checkpoint,
        dtype=torch.float16,
        device_map={"": workspace.main},
        quantization_config=tiny.quantization_config("4bit", skip_modules=["model.vision_tower", "model.audio_tower"]),
    )
    language = prepare(model).model.language_model
    assert language.embed_tokens_per_layer.weight.dtype == torch.float16
    assert language.embed_tokens.weight.dtype == torch.float32
    with torch.no_grad():
        assert model.eval()(**tiny.inputs(workspace.main, text_only=True)).logits.isfinite().all()


@pytest.mark.parametrize("checkpointing", [True, False])
def test_checkpointing_is_switched_as_upstream_does(workspace: Any, checkpointing: bool) -> None:
    model = prepare(workspace.load("4bit"), use_gradient_checkpointing=checkpointing)
    layers = model.model.language_model.layers
    assert {layer.gradient_checkpointing for layer in layers} == {checkpointing}


def test_what_is_not_quantized_or_not_gemma_4_is_upstreams(workspace: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=8)).to(torch.bfloat16)
    other.is_loaded_in_4bit = True
    for model in (workspace.load(), other):
        assert set(dtypes(prepare(model)).values()) == {torch.float32}


def test_a_preparation_that_fails_hides_nothing(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = workspace.load("4bit")
    before = dict(model.named_parameters())

    def fails(**_: Any) -> None:
        raise RuntimeError("no checkpointing today")

    monkeypatch.setattr(model, "gradient_checkpointing_enable", fails, raising=False)
    monkeypatch.setattr(model, "activation_checkpointing_enable", fails, raising=False)
    with pytest.raises(RuntimeError, match="today"):
        prepare(model, use_gradient_checkpointing=True)
    assert list(before) == [name for name, _ in model.named_parameters()]
    assert all(weight is before[name] for name, weight in model.named_parameters())


def test_undone_it_is_upstreams_again(workspace: Any) -> None:
    import torch

    gemma4_compat.revert(PATCH.id)
    try:
        model = prepare(workspace.load("4bit"))
        assert model.model.language_model.embed_tokens_per_layer.weight.dtype == torch.float32
    finally:
        gemma4_compat.install()
