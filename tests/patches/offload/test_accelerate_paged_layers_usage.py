"""What else users do with streamed layers: exceptions, single modules, changed weights, saving, copying."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.accelerate import module_hooks as _placement
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from tests.patches.offload.streamed_models import INFERENCE, LAST, LAYER, assert_as_accelerate_left_it, split


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", [LAYER, f"{LAYER}.mlp", f"{LAST}.self_attn.o_proj"])
def test_an_exception_in_the_middle_of_a_layer(
    workspace: Any, one_device: Callable[..., Any], name: str, kind: type[BaseException]
) -> None:
    import torch

    model = split(workspace, "4bit-double")
    batch = tiny.inputs(workspace.main)

    def fail(*_: Any) -> None:
        raise kind("stop")

    for _ in range(2):
        handle = model.get_submodule(name).register_forward_hook(fail)
        with torch.no_grad(), pytest.raises(kind, match="stop"):
            model(**batch)
        handle.remove()
        if kind is ValueError:
            assert_as_accelerate_left_it(model)
        assert difference(one_device("4bit-double", None), workspace.outputs(model)) == 0.0
        assert_as_accelerate_left_it(model)


@INFERENCE
@pytest.mark.parametrize("first", ["alone", "model"])
def test_a_module_of_a_streamed_layer_used_by_itself(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, first: str, store: str
) -> None:
    import torch

    name = f"{LAYER}.mlp.up_proj"
    whole, model = workspace.load(quantization), split(workspace, quantization, store=store)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1)).to(workspace.main, torch.bfloat16)
    expected = [whole.get_submodule(part)(x) for part in (name, f"{LAYER}.mlp")]
    for _ in range(3):
        if first == "model":
            assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
        for part, value in zip((name, f"{LAYER}.mlp"), expected):
            assert torch.equal(model.get_submodule(part)(x), value)
        first = "model"
    assert_as_accelerate_left_it(model)


def test_layers_called_by_hand_in_any_order(workspace: Any, one_device: Callable[..., Any]) -> None:
    import torch

    models = workspace.load("4bit"), split(workspace, "4bit", "all layers")
    batch = tiny.inputs(workspace.main)
    calls: dict[int, tuple[Any, Any]] = {}
    for index, layer in enumerate(models[0].model.language_model.layers):
        layer.register_forward_pre_hook(
            lambda _layer, args, kwargs, index=index: calls.update({index: (args, dict(kwargs))}), with_kwargs=True
        )
    with torch.no_grad():
        models[0](**batch, use_cache=False)
        for order in ((0, 3, 1, 1, 2, 3), (3, 2, 1, 0), (2, 0, 2, 0)):
            for index in order:
                args, kwargs = calls[index]
                outputs = [model.model.language_model.layers[index](*args, **kwargs) for model in models]
                outputs = [output[0] if isinstance(output, tuple) else output for output in outputs]
                assert torch.equal(*outputs)
    assert difference(one_device("4bit", None), workspace.outputs(models[1])) == 0.0


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_the_next_forward_has_changed_weights(workspace: Any, store: str) -> None:
    import torch

    whole, model = workspace.load(), split(workspace, store=store)
    assert difference(workspace.outputs(whole), workspace.outputs(model)) == 0.0
    for name in (f"{LAYER}.mlp.up_proj", f"{LAST}.self_attn.q_proj", f"{LAYER}.mlp.up_proj"):
        before = workspace.outputs(whole)
        for changed in (whole, model):
            module = changed.get_submodule(name)
            with torch.no_grad(), _placement.weights_brought_in(module):
                module.weight.data = module.weight.data * 1.5
        assert difference(before, workspace.outputs(whole)) > 0.0
        assert difference(workspace.outputs(whole), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("quantization", [None, "4bit"])
def test_the_next_forward_has_a_merged_adapter(workspace: Any, quantization: str | None, store: str) -> None:
    from peft import PeftModel

    models = [
        PeftModel.from_pretrained(base, workspace.adapter("language"))
        for base in (workspace.load(quantization), split(workspace, quantization, "layers", store))
    ]
    start = workspace.outputs(models[0])
    assert difference(start, workspace.outputs(models[1])) == 0.0
    for model in models:
        model.merge_adapter()
    merged = workspace.outputs(models[0])
    assert difference(start, merged) > 0.0
    assert difference(merged, workspace.outputs(models[1])) == 0.0
    for model in models:
        model.unmerge_adapter()
    assert difference(workspace.outputs(models[0]), workspace.outputs(models[1])) == 0.0
    whole, streamed = (model.merge_and_unload() for model in models)
    assert difference(workspace.outputs(whole), workspace.outputs(streamed)) == 0.0


@INFERENCE
def test_saved_and_loaded_again(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path, quantization: str | None, store: str
) -> None:
    import torch

    model = split(workspace, quantization, store=store)
    keys = set(model.state_dict())
    for _ in range(2):
        assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert set(model.state_dict()) == keys
    model.save_pretrained(tmp_path)
    loaded = tiny.load(tmp_path, device=workspace.main)
    assert difference(one_device(quantization, None), workspace.outputs(loaded)) == 0.0
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after forwards"])
def test_a_deep_copy(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, used: bool, store: str
) -> None:
    model = split(workspace, quantization, store=store)
    if used:
        workspace.outputs(model)
    copied = copy.deepcopy(model)
    for one in (copied, model, copied, model):
        assert difference(one_device(quantization, None), workspace.outputs(one)) == 0.0
    del model
    gc.collect()
    assert difference(one_device(quantization, None), workspace.outputs(copied)) == 0.0


@INFERENCE
def test_dispatched_again_and_hooks_removed(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, store: str
) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    model = split(workspace, quantization, "layers", store)
    workspace.outputs(model)
    remove_hook_from_submodules(model)
    assert not [name for name, weight in model.named_parameters() if weight.device.type == "meta"]
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
    for offload in ("both", "towers", "layers"):
        model = workspace.dispatch(model, offload)
        assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0
        remove_hook_from_submodules(model)
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0


def test_without_hooks_a_model_can_be_pickled(workspace: Any) -> None:
    import torch
    from accelerate.hooks import remove_hook_from_submodules

    model = split(workspace, offload="all layers")
    workspace.outputs(model)
    remove_hook_from_submodules(model)
    assert not [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    file = io.BytesIO()
    torch.save(model.model.language_model.layers, file)
    assert file.tell()


def test_two_models_at_once(workspace: Any, one_device: Callable[..., Any]) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    models = split(workspace, "4bit"), split(workspace, None, "all layers")
    with torch.no_grad():
        for _ in range(3):
            for model, quantization in zip(models, ("4bit", None)):
                logits = model(**batch).logits.float().cpu()
                assert torch.equal(logits, one_device(quantization, None).logits[0])
