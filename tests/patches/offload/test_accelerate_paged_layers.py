"""F31: streaming of offloaded layers changes no output, with hooks, torch.compile and a revert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine.patch import FORWARDS
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat._offload.transfer import streaming
from gemma4_compat.patches.offload.accelerate_paged_layers import PATCH
from tests.helpers import pairwise
from tests.patches.offload.streamed_models import (
    INFERENCE,
    LAYER,
    QUANTIZATIONS,
    assert_as_accelerate_left_it,
    groups,
    split,
)
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "accelerate copies each by itself"


@pytest.mark.parametrize("offload", ["layers", "towers", "both", "all layers"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_outputs_are_those_of_one_device(
    workspace: Any,
    one_device: Callable[..., Any],
    streamers: list[streaming.LayerStreamer],
    quantization: str | None,
    offload: str,
    store: str,
) -> None:
    model = split(workspace, quantization, offload, store)
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    expected = {"layers": [3], "towers": [2, 2], "both": [2, 2, 3], "all layers": [2, 2, 6]}[offload]
    assert sorted(len(groups(streamer)) for streamer in streamers) == expected, "each offloaded layer is a group"
    assert_as_accelerate_left_it(model)


@pytest.mark.parametrize("when", ["before the dispatch", "after it", "after forwards"])
@INFERENCE
def test_an_adapter(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, when: str, store: str
) -> None:
    from peft import PeftModel

    if when == "before the dispatch":
        base = workspace.load(quantization)
        model = PeftModel.from_pretrained(base, workspace.adapter("all"))
        placement = tiny.device_map(base, "layers", main=workspace.main, offloaded=workspace.offloaded)
        workspace.dispatch_map(base, placement)
    else:
        base = split(workspace, quantization, store=store)
        if when == "after forwards":
            assert difference(one_device(quantization, None), workspace.outputs(base)) == 0.0
        model = PeftModel.from_pretrained(base, workspace.adapter("all"))
    assert difference(one_device(quantization, "all"), workspace.outputs(model)) == 0.0
    with model.disable_adapter():
        assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    model.load_adapter(str(workspace.adapter("language")), "second")
    for name, adapter in (("second", "language"), ("default", "all")):
        model.set_adapter(name)
        assert difference(one_device(quantization, adapter), workspace.outputs(model)) == 0.0
    model.delete_adapter("second")
    assert difference(one_device(quantization, "all"), workspace.outputs(model)) == 0.0
    assert difference(one_device(quantization, None), workspace.outputs(model.unload())) == 0.0


def test_a_batch_with_padding(workspace: Any, store: str) -> None:
    import torch

    ids = torch.randint(3, 240, (3, 20), generator=torch.Generator().manual_seed(1)).to(workspace.main)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 13)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    found = []
    for model in (workspace.load("4bit"), split(workspace, "4bit", "all layers", store)):
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits.cpu()
            tokens = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False).cpu()
        found.append((logits, tokens))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("cache", ["dynamic", "static", "offloaded", "offloaded_static", "no"])
def test_generate_with_a_cache(workspace: Any, cache: str) -> None:
    import torch

    if "offloaded" in cache and workspace.main == "cpu":
        pytest.skip("transformers' offloaded caches need an accelerator")
    options = {"use_cache": False} if cache == "no" else {"cache_implementation": cache}
    options |= {"max_new_tokens": 12, "do_sample": False}
    batch = tiny.inputs(workspace.main)
    models = workspace.load("4bit-double"), split(workspace, "4bit-double")
    whole, streamed = (model.generate(**batch, **options).cpu() for model in models)
    assert torch.equal(whole, streamed)


def test_beams_and_sampling(workspace: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        tokens = []
        for model in (workspace.load(), split(workspace)):
            torch.manual_seed(5)
            tokens.append(model.generate(**batch, max_new_tokens=8, **options).cpu())
        assert torch.equal(*tokens)


def user_hook() -> Any:
    from accelerate.hooks import ModelHook

    class Counted(ModelHook):  # type: ignore[misc]
        calls = 0

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return args, kwargs

    return Counted()


@pytest.mark.parametrize(
    ("name", "append", "when"),
    pairwise(
        [f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp", "model.language_model.layers.1.mlp", LAYER],
        [True, False],
        ["fresh", "after forwards"],
    ),
)
def test_a_hook_of_the_user_runs(
    workspace: Any, one_device: Callable[..., Any], name: str, append: bool, when: str
) -> None:
    from accelerate.hooks import add_hook_to_module

    model = split(workspace)
    if when == "after forwards":
        workspace.outputs(model)
    if not append and name.endswith("up_proj"):
        pytest.skip("it would take the hook that brings the weight in")
    hook = user_hook()
    add_hook_to_module(model.get_submodule(name), hook, append=append)
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert hook.calls >= 4
    calls = hook.calls
    workspace.outputs(model)
    assert hook.calls == 2 * calls


def test_a_hook_that_has_nothing_to_do_is_there_between_forwards(
    workspace: Any, one_device: Callable[..., Any]
) -> None:
    model = split(workspace)
    name = "model.language_model.layers.1.mlp"  # not offloaded
    module = model.get_submodule(name)
    inside: list[bool] = []
    module.register_forward_hook(lambda *_: inside.append(module.forward is module._old_forward))
    assert difference(one_device(None, None), workspace.outputs(model)) == 0.0
    assert inside
    assert all(inside)
    assert_as_accelerate_left_it(model)


def test_models_that_are_not_gemma_4_have_no_groups(streamers: list[streaming.LayerStreamer], tmp_path: Path) -> None:
    import torch
    from accelerate import dispatch_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **shape)).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(ids).logits
    placement = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    placement |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = dispatch_model(model, placement, offload_dir=str(tmp_path))
    assert not streamers
    assert not [module for module in model.modules() if module in attached.STREAMING or module in attached.IDLE]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile(workspace: Any) -> None:
    import torch

    batch = workspace.inputs(text_only=True)  # the towers are not offloaded here, and take long
    model = split(workspace, "4bit", "layers")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = workspace.load("4bit")(**batch).logits
        for _ in range(FORWARDS):
            assert torch.equal(compiled(**batch).logits, expected)
    assert_as_accelerate_left_it(model)


def test_reverted_a_running_model_stays_right_and_the_next_one_has_no_groups(
    workspace: Any, one_device: Callable[..., Any], streamers: list[streaming.LayerStreamer]
) -> None:
    running = split(workspace, "4bit")
    workspace.outputs(running)
    before = len(streamers)
    try:
        assert gemma4_compat.revert(PATCH.id)[PATCH.id].state is gemma4_compat.PatchState.REVERTED
        for _ in range(2):
            assert difference(one_device("4bit", None), workspace.outputs(running)) == 0.0
        after = split(workspace, "4bit")
        assert len(streamers) == before
        assert difference(one_device("4bit", None), workspace.outputs(after)) == 0.0
    finally:
        gemma4_compat.install()
    assert gemma4_compat.status()[PATCH.id].state is gemma4_compat.PatchState.APPLIED
    assert difference(one_device("4bit", None), workspace.outputs(split(workspace, "4bit"))) == 0.0
    assert len(streamers) > before
