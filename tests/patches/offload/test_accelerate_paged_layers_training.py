"""Training with streamed layers: gradients, checkpointing, several graphs, failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat._offload.transfer import streaming
from tests.patches.offload.streamed_models import (
    LAST,
    LAYER,
    QUANTIZATIONS,
    TRAINING,
    adapted,
    assert_as_accelerate_left_it,
    assert_equal,
    bytes_on_device,
    checkpoint,
    split,
    trained,
)


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("offload", ["both", "all layers"])
@TRAINING
def test_training_gives_the_gradients_of_one_device(
    workspace: Any, quantization: str | None, offload: str, checkpointing: bool | None, store: str
) -> None:
    results = []
    for base in (workspace.load(quantization), split(workspace, quantization, offload, store)):
        model = adapted(workspace, base)
        checkpoint(model, checkpointing)
        results.append(trained(workspace, model, steps=3))
    assert_equal(*results)
    assert_as_accelerate_left_it(model)


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_accumulated_gradients_and_a_graph_used_twice(workspace: Any, quantization: str | None) -> None:
    models = [adapted(workspace, base) for base in (workspace.load(quantization), split(workspace, quantization))]
    assert_equal(*(trained(workspace, model, steps=2, accumulate=3) for model in models))
    assert_equal(*(trained(workspace, model, steps=2, backwards=2) for model in models))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_two_graphs_alive_and_their_backward_passes_in_either_order(workspace: Any, quantization: str | None) -> None:
    results = []
    for base in (workspace.load(quantization), split(workspace, quantization, "all layers")):
        model = adapted(workspace, base)
        batch = tiny.inputs(workspace.main)
        for order in ((0, 1), (1, 0)):
            losses = [model(**batch, labels=batch["input_ids"]).loss for _ in order]
            model.eval()(**batch)
            model.train()
            for index in order:
                losses[index].backward()
        results.append(([], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    assert_equal(*results)


def inner_outputs(model: Any, name: str) -> list[Any]:
    """The outputs of the module ``name`` of the base model in forwards from now on."""
    found: list[Any] = []
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.get_submodule(name).register_forward_hook(
        lambda _module, _inputs, output: found.append(output[0] if isinstance(output, tuple) else output)
    )
    return found


@pytest.mark.parametrize(
    "name", [LAYER, f"{LAST}.mlp", f"{LAST}.self_attn", f"{LAYER}.mlp", f"{LAYER}.mlp.up_proj", f"{LAYER}.self_attn"]
)
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_a_loss_from_the_middle_of_the_model(workspace: Any, quantization: str | None, name: str) -> None:
    """Also of the middle of a layer: the gradient of that layer's output never comes."""
    import torch

    results = []
    for base in (workspace.load(quantization), split(workspace, quantization, "all layers")):
        model = adapted(workspace, base)
        found = inner_outputs(model, name)
        batch = tiny.inputs(workspace.main)
        for _ in range(2):
            model(**batch)
            found.pop().float().square().mean().backward()
        results.append(([], {key: p.grad for key, p in model.named_parameters() if p.grad is not None}))
    assert torch.is_grad_enabled()
    assert_equal(*results)


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_dora(workspace: Any, quantization: str | None, store: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    results = []
    for base in (workspace.load(quantization), split(workspace, quantization, "all layers", store)):
        torch.manual_seed(3)
        config = LoraConfig(
            r=2, target_modules=tiny_adapters.TARGETS["language"], use_dora=True, init_lora_weights=False
        )
        model = get_peft_model(base, config).train()
        results.append(trained(workspace, model, steps=2))
    assert_equal(*results)


@TRAINING
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_training_after_forwards_without_gradients(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, mode: str, store: str
) -> None:
    import torch

    base = split(workspace, quantization, store=store)
    with getattr(torch, mode)():
        base(**tiny.inputs(workspace.main))
        base.generate(**tiny.inputs(workspace.main), max_new_tokens=2)
    results = [
        trained(workspace, adapted(workspace, model), steps=2) for model in (workspace.load(quantization), base)
    ]
    assert_equal(*results)
    # And the reverse: module groups created in training serve inference mode.
    model = adapted(workspace, split(workspace, quantization, store=store))
    trained(workspace, model)
    model.load_adapter(str(workspace.adapter("all")), "fresh")
    model.set_adapter("fresh")
    with torch.inference_mode():
        assert difference(one_device(quantization, "all"), workspace.outputs(model.eval())) == 0.0


@pytest.mark.parametrize("checkpointing", [None, False], ids=["plain", "non-reentrant"])
def test_a_backward_pass_that_fails(
    workspace: Any, streamers: list[streaming.LayerStreamer], checkpointing: bool | None
) -> None:
    model = adapted(workspace, split(workspace, "4bit", "all layers"))
    checkpoint(model, checkpointing)
    batch = tiny.inputs(workspace.main)
    middle = model.get_base_model().get_submodule("model.language_model.layers.2")

    def fail(_module: Any, _inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda _gradient: 1 / 0)

    handle = middle.register_forward_hook(fail)
    loss = model(**batch, labels=batch["input_ids"]).loss
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    del loss
    model.zero_grad()
    whole = adapted(workspace, workspace.load("4bit"))
    checkpoint(whole, checkpointing)
    assert_equal(trained(workspace, model, steps=2), trained(workspace, whole, steps=2))
    assert [bytes_on_device(streamer) for streamer in streamers] == [0, 0, 0]


def test_gradients_of_inputs(workspace: Any) -> None:
    import torch

    gradients = []
    for model in (workspace.load(), split(workspace, offload="all layers")):
        embedded = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(2)).to(workspace.main, torch.bfloat16)
        embedded.requires_grad_()
        ids = torch.arange(3, 12, device=workspace.main)[None]
        per_layer = model.model.language_model.get_per_layer_inputs
        with contextlib.suppress(TypeError):
            per_layer = per_layer(ids, None)
        if callable(per_layer):
            per_layer = model.model.language_model.get_per_layer_inputs(ids)
        out = model.model.language_model(inputs_embeds=embedded, per_layer_inputs=per_layer).last_hidden_state
        out.float().square().mean().backward()
        gradients.append(embedded.grad)
    assert torch.equal(*gradients)
    assert gradients[0].any()
