"""What a training step computes or keeps though nobody reads it: left out, loss and gradients have the same bits."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest

from gemma4_compat._training import norms, per_layer, shared_states
from tests.helpers import without
from tests.patches.training.test_transformers_chunked_loss import batch, off, step
from tests.patches.training.test_transformers_chunked_mlp import TOKENS, adapted
from tests.unit.training.test_norms import checkpointed


def compare(model: Any, given: dict[str, Any], part: Any) -> None:
    plain, right = step(model, given)
    part.ask(model, TOKENS)
    outputs, found = step(model, given)
    part.leave(model)
    assert outputs.loss.equal(plain.loss)
    assert off(right, found) == 0


@pytest.mark.parametrize("part", [shared_states, per_layer], ids=["shared_states", "per_layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("text_only", [False, True])
def test_bits(workspace: Any, part: Any, dtype: str, checkpointing: bool, text_only: bool) -> None:
    import torch

    model = adapted(workspace.load().to(getattr(torch, dtype)))
    model = checkpointed(model, False) if checkpointing else model
    compare(model, batch(workspace, text_only=text_only), part)


@pytest.mark.parametrize("part", [shared_states, per_layer], ids=["shared_states", "per_layer"])
@pytest.mark.parametrize("kind", ["4bit", "packed", "offloaded", "all trained"])
def test_bits_of_other_steps(workspace: Any, part: Any, kind: str) -> None:
    import torch
    from peft import PeftModel

    given = batch(workspace, text_only=True)
    if kind == "offloaded":
        model = PeftModel.from_pretrained(workspace.split(), workspace.adapter("language"), is_trainable=True)
    elif kind == "all trained":
        model = workspace.load_text()
    else:
        model = adapted(workspace.load("4bit" if kind == "4bit" else None))
    if kind == "packed":
        length = given["input_ids"].shape[1]
        given = {name: torch.cat([value, value], dim=1) for name, value in given.items() if name != "attention_mask"}
        given["position_ids"] = torch.arange(length, device=workspace.main).repeat(2)[None]
    compare(checkpointed(model, False), given, part)


@pytest.mark.parametrize("by", ["transformers", "torch"])
def test_the_mapping_keeps_the_keys_of_the_forward_pass(workspace: Any, by: str) -> None:
    """In torch's checkpoints with every patch: `transformers-checkpointed-states` does not know of them."""
    model = adapted(workspace.load_text())
    if by == "transformers":
        checkpointed(model, False)
    else:
        wrappers = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
        for text in per_layer.found(model):
            for index, layer in enumerate(text.layers):
                text.layers[index] = wrappers.checkpoint_wrapper(layer)
    (first, *_) = storing = list(shared_states.found(model))
    assert {layer.layer_type for layer in storing} == set(model.config.layer_types)
    seen: list[tuple[Any, Any]] = []

    def look(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        states = kwargs["shared_kv_states"]
        seen.append((states, next(iter(states.values()))[0]))

    first.register_forward_hook(look, with_kwargs=True)
    for asked in (False, True):
        if asked:
            shared_states.ask(model, TOKENS)
        seen.clear()
        # Where transformers checkpoints, this patch gives the layer a mapping of its own.
        with without("transformers-checkpointed-states") if by == "transformers" else contextlib.nullcontext():
            step(model, {**batch(workspace, text_only=True), "use_cache": False})
        (states, stored), (again, stored_again) = seen
        assert dict(again) == dict(states)
        assert (stored_again is stored) == asked


def test_a_graph_that_is_kept_can_be_used_again(workspace: Any) -> None:
    model = checkpointed(adapted(workspace.load_text()), False).train()
    shared_states.ask(model, TOKENS)
    loss = model(**batch(workspace, text_only=True)).loss
    found = []
    for kept in (True, False):
        model.zero_grad()
        loss.backward(retain_graph=kept)
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert off(*found) == 0


@pytest.mark.parametrize("text_only", [False, True])
def test_per_layer_inputs_have_a_graph_only_if_somebody_reads_it(workspace: Any, text_only: bool) -> None:
    """A saliency map, given embeddings, a trained table, a trained projection: their gradients stay."""
    import torch
    from peft import LoraConfig, get_peft_model

    given = batch(workspace, text_only=text_only)

    def graph(model: Any, more: dict[str, Any] = given) -> bool:
        per_layer.ask(model, TOKENS)
        seen: list[bool] = []
        (text,) = per_layer.found(model)
        handle = text.layers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[1].requires_grad))
        step(model, more)
        handle.remove()
        per_layer.leave(model)
        return seen[0]

    def checked(**options: Any) -> Any:
        return checkpointed(get_peft_model(workspace.load(), LoraConfig(r=2, **options)), False)

    assert graph(checked(target_modules="all-linear", exclude_modules=".*tower.*")) is True  # the projection
    assert graph(checked(target_modules=["q_proj"], modules_to_save=["embed_tokens"])) is True
    model = checked(target_modules=["q_proj"], exclude_modules=".*tower.*")
    assert graph(model) is not text_only  # features of images are put among the embeddings
    assert graph(model, {name: value[:, :TOKENS] for name, value in given.items()} if text_only else given) is True
    if text_only:
        embedding = model.get_input_embeddings()
        with torch.no_grad():
            embeds = embedding(given["input_ids"]).requires_grad_()
        others = {name: value for name, value in given.items() if name != "input_ids"}
        step(model, {**others, "inputs_embeds": embeds})
        right, embeds.grad = embeds.grad, None
        assert graph(model, {**others, "inputs_embeds": embeds}) is True
        assert torch.equal(embeds.grad, right)
        embedding.register_forward_hook(lambda _module, _args, output: output.requires_grad_())
        assert graph(model) is True


@pytest.mark.full  # a minute
def test_a_step_in_the_shapes_of_an_e4b_takes_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve 4-bit layers of its widths, on tensors without memory; MLPs are in chunks in both steps."""
    from gemma4_compat._gemma4.models import build
    from gemma4_compat._plan import training, training_step

    def peak() -> int:
        config = copy.deepcopy(build.on_meta("E4B")[0].config)
        text = config.text_config
        text.num_hidden_layers, text.num_kv_shared_layers, text.vocab_size_per_layer_input = 12, 6, 1024
        text.layer_types = text.layer_types[:12]
        config.vision_config = config.audio_config = None
        step = training_step.Step(
            max_length=8192, chunked_loss=True, chunked_mlp=True, activation_offloading=training_step.can_offload()
        )
        return training._measure(config, "4bit", step).backward

    found = peak()
    for part in (norms, shared_states, per_layer):
        monkeypatch.setattr(part, "ask", lambda *_: None)
    assert found < 0.75 * peak()
