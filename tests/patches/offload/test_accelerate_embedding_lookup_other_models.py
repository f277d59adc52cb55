"""Embeddings outside Gemma 4: other models, tied heads, quantized embeddings."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._offload.transfer import row_lookup
from gemma4_compat.patches.offload.accelerate_embedding_lookup import largest_tensor
from tests.patches.offload.looked_up_embeddings import lookups


@contextlib.contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    messages: list[str] = []
    with caplog.at_level(logging.WARNING, logger="gemma4_compat"):
        caplog.clear()
        yield messages
        messages += [record.getMessage() for record in caplog.records if record.name == "gemma4_compat"]


def llama(*, tied: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def test_a_tied_head_on_the_device_is_logged_once_and_its_copy_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The hook is that of ``dispatch_model`` with the embedding on the CPU and the head on the device."""
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    device = torch.device("cpu")
    embedding = torch.nn.Embedding(64, 32).eval()
    on_host, head = embedding.weight.data, torch.nn.Linear(32, 64, bias=False)
    head.weight = torch.nn.Parameter(on_host.clone())
    ids = torch.arange(3, 15).reshape(1, 12)
    hook = AlignDevicesHook(
        execution_device=device,
        offload=True,
        weights_map={"weight": on_host},
        tied_params_map={on_host.data_ptr(): {device: head.weight}},
    )
    reference = embedding(ids)
    add_hook_to_module(embedding, hook)
    forward, found = embedding._old_forward, []

    def watch(tokens: Any) -> Any:
        found.append(embedding.weight.data_ptr())
        return forward(tokens)

    embedding._old_forward = watch
    with logged(caplog) as messages:
        for _ in range(3):
            assert torch.equal(embedding(ids), reference)
    assert len([message for message in messages if "the head tied to it" in message]) == 1, messages
    assert set(found) == {head.weight.data_ptr()}, "the embedding has a copy of its own"
    assert embedding.weight.device.type == "meta"
    assert lookups(embedding) == []


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_that_is_not_gemma_4(tmp_path: Path, way: str, tied: bool) -> None:
    import torch
    from accelerate import dispatch_model

    model = llama(tied=tied)
    ids = torch.arange(3, 15).reshape(1, 12)
    with torch.no_grad():
        reference = model(ids).logits
        tokens = model.generate(ids, max_new_tokens=5, do_sample=False)
        placement = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu"}
        placement |= {"model.rotary_emb": "cpu", "lm_head": "disk" if tied else "cpu"}
        model = dispatch_model(model, placement, offload_dir=str(tmp_path))
        for _ in range(3):
            assert torch.equal(model(ids).logits, reference)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), tokens)
    assert lookups(model) == ["model.embed_tokens"]
    assert largest_tensor(lambda: model.model.embed_tokens(ids)) < model.model.embed_tokens.weight.numel()


@pytest.mark.parametrize("quantized", ["Embedding4bit", "Embedding8bit"])
def test_quantized_embeddings_are_left_to_upstream(quantized: str) -> None:
    import bitsandbytes
    import torch
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    module = getattr(bitsandbytes.nn, quantized)(256, 64).to("cpu").eval()
    hook = AlignDevicesHook(execution_device=torch.device("cpu"), offload=True)
    add_hook_to_module(module, hook)
    assert type(module.weight) is not torch.nn.Parameter
    assert row_lookup.lookup_for(hook, module) is None
