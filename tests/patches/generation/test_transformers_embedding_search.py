"""transformers-embedding-search: the tokens of ``inputs_embeds`` of E2B and E4B."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._gemma4.models import per_layer
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_embedding_search import PATCH
from tests.patches.placement import splits
from tests.patches.promise import Promise

WIDTH = 96  # its root is rounded in bfloat16


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: It seems like you tried to call `forward` from `inputs_embeds`"


def load(workspace: Any, variant: str = "E2B", dtype: str = "bfloat16") -> Any:
    import torch

    folder = workspace.cached(tiny_models.build_checkpoint, variant=variant, width=WIDTH)
    return tiny.load(folder, device=workspace.main, dtype=getattr(torch, dtype))


def logits(model: Any, **batch: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**batch).logits


def assert_same(model: Any, batch: dict[str, Any]) -> None:
    import torch

    others = {name: value for name, value in batch.items() if name != "input_ids"}
    embeds = model.get_input_embeddings()(batch["input_ids"])
    assert torch.equal(logits(model, **batch), logits(model, inputs_embeds=embeds, **others))


@pytest.mark.parametrize("variant", ["E2B", "E4B"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("text_only", [False, True])
def test_the_logits_are_those_of_the_tokens(workspace: Any, variant: str, dtype: str, text_only: bool) -> None:
    model = load(workspace, variant, dtype)
    assert_same(model, tiny.inputs(model.device, text_only=text_only, variant=variant))


def test_a_model_that_was_cast(workspace: Any) -> None:
    model = load(workspace).float()
    assert_same(model, tiny.inputs(model.device))


@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_an_offloaded_embedding(workspace: Any, tmp_path: Path, kind: str) -> None:
    model = splits.split(workspace, kind, [splits.EMBEDDING, splits.HEAD, splits.PER_LAYER], tmp_path)
    assert_same(model, workspace.inputs())
    assert_same(model, workspace.inputs(text_only=True))


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_quantized_model(workspace: Any, quantization: str) -> None:
    assert_same(workspace.load(quantization), workspace.inputs())


@pytest.mark.parametrize("options", [{"target_modules": ["embed_tokens"]}, {"trainable_token_indices": [3, 4, 5]}])
def test_an_adapter_on_the_embedding(workspace: Any, options: dict[str, Any]) -> None:
    import peft
    import torch

    config = peft.LoraConfig(r=2, init_lora_weights=False, **{"target_modules": ["q_proj"], **options})
    model = peft.get_peft_model(load(workspace), config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "trainable_tokens_delta" in name:
                value.add_(0.5)
    assert_same(model, tiny.inputs(model.device))


def test_embeddings_of_another_dtype_and_signs_of_zero(workspace: Any) -> None:
    import torch

    model = load(workspace)
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[7, :9] = 0.0
        ids = torch.tensor([[5, 7, 9]], device=model.device)
        embeds = model.get_input_embeddings()(ids).float()
    embeds[0, 1, :4] = -0.0
    assert per_layer.tokens_of(per_layer.text_model(model), embeds).tolist() == ids.tolist()


def test_the_text_model_by_itself(workspace: Any) -> None:
    assert_same(workspace.load_text(), workspace.inputs(text_only=True))


def test_memory_is_bounded_in_sequence_and_vocabulary(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that is made. Upstream's has prompt times vocabulary times width elements."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > self.size:
                    self.size = value.untyped_storage().nbytes()
            return result

    monkeypatch.setattr(per_layer, "SCRATCH", 2**16)
    model = load(workspace)
    text = per_layer.text_model(model)
    vocabulary, length = 20_000, 4_000
    text.embed_tokens.weight = torch.nn.Parameter(torch.randn(vocabulary, WIDTH, dtype=torch.bfloat16))
    text.config.vocab_size = vocabulary
    ids = torch.randint(0, vocabulary, (1, length))
    with torch.no_grad():
        embeds = text.embed_tokens(ids)
        monkeypatch.setattr(text.embed_tokens_per_layer, "forward", lambda ids: ids[..., None].expand(*ids.shape, 1))
        with Largest() as largest:
            found = per_layer.tokens_of(text, embeds)
    assert torch.equal(found, ids)
    table, prompt = vocabulary * WIDTH * 2, length * WIDTH * 2
    assert largest.size <= max(table, prompt)  # the weight itself: nothing is larger than what there is


def test_a_training_with_embeddings(workspace: Any) -> None:
    """The gradients, those of the embeddings included, are those of the tokens."""
    import torch

    model, batch = load(workspace), tiny.inputs(workspace.main, text_only=True)
    ids = batch["input_ids"]
    grads = []
    for given in ("tokens", "embeddings"):
        model.zero_grad()
        embeds = model.get_input_embeddings()(ids)
        embeds.retain_grad()
        told = {"inputs_embeds": embeds}
        if given == "tokens":
            text = per_layer.text_model(model)
            told["per_layer_inputs"] = text.get_per_layer_inputs(ids, None)
        model(**told, attention_mask=batch["attention_mask"], labels=ids).loss.backward()
        grads.append([embeds.grad, *(value.grad for value in model.parameters() if value.grad is not None)])
    assert len(grads[0]) == len(grads[1])
    assert all(map(torch.equal, *grads))
    assert grads[0][0].any()


def soft(model: Any, ids: Any) -> Any:
    """The embeddings of ``ids``, of which the second is no token's."""
    embeds = model.get_input_embeddings()(ids).detach().clone()
    embeds[0, 1] *= 1.5
    return embeds


def test_an_embedding_that_is_no_tokens_is_refused(workspace: Any) -> None:
    model = load(workspace)
    ids = tiny.inputs(model.device, text_only=True)["input_ids"]
    expected = r"1 of 24 inputs_embeds \(the first is at \(0, 1\)\) are the embedding of no token.*per_layer_inputs="
    with pytest.raises(RuntimeError, match=expected):
        logits(model, inputs_embeds=soft(model, ids))


def test_what_the_refusal_says_helps(workspace: Any) -> None:
    import torch

    model = load(workspace)
    ids = tiny.inputs(model.device, text_only=True)["input_ids"]
    tokens = ids.clone()
    tokens[0, 1] = model.config.text_config.pad_token_id
    embeds, text = soft(model, ids), per_layer.text_model(model)
    expected = logits(model, inputs_embeds=embeds, per_layer_inputs=text.get_per_layer_inputs(tokens, None))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "return_dict_in_generate": True}
    found = model.generate(input_ids=tokens, inputs_embeds=embeds, output_logits=True, do_sample=False, **options)
    assert torch.equal(found.logits[0], expected[:, -1].float())


def test_tokens_with_one_embedding_are_refused_where_it_matters(workspace: Any) -> None:
    model = load(workspace)
    text = per_layer.text_model(model)
    ids = tiny.inputs(model.device, text_only=True)["input_ids"]
    text.embed_tokens.weight.data[245] = text.embed_tokens.weight.data[ids[0, 3]]
    with pytest.raises(Gemma4CompatError, match=rf"the tokens {ids[0, 3]} and 245 have the same embedding"):
        logits(model, inputs_embeds=model.get_input_embeddings()(ids))
    text.embed_tokens_per_layer.weight.data[245] = text.embed_tokens_per_layer.weight.data[ids[0, 3]]
    assert_same(model, {"input_ids": ids})


def test_tokens_beside_embeddings(workspace: Any) -> None:
    """An embedding of another token is that token's, as upstream has it; what is none has the token beside."""
    import torch

    model = load(workspace)
    ids = tiny.inputs(model.device, text_only=True)["input_ids"]
    embeds = soft(model, ids)
    beside = ids.clone()
    beside[0, 4] = (ids[0, 4] + 1) % 200
    assert torch.equal(per_layer.known_inputs(model, beside, embeds), per_layer.inputs_of(model, ids))


@pytest.mark.parametrize("text", [False, True])
def test_per_layer_inputs_are_for_the_prompt(workspace: Any, text: bool) -> None:
    import torch

    model = workspace.load_text() if text else workspace.load()
    if "per_layer_inputs" not in inspect.signature(model.forward).parameters:
        pytest.skip("this generate takes no per_layer_inputs")
    ids = workspace.inputs(text_only=True)["input_ids"]
    embeds = model.get_input_embeddings()(ids)
    told = {"inputs_embeds": embeds, "per_layer_inputs": per_layer.inputs_of(model, ids)}
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    for more in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        expected = model.generate(input_ids=ids, **options, **more)[:, ids.shape[1] :]
        assert torch.equal(model.generate(**told, **options, **more), expected)
