"""torch.compile traces through what the patches replace, without graph breaks, to the same answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine.changes import ChangeSet
from gemma4_compat._gemma4.adapters.clipped import is_wrapper
from tests.helpers import Library


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_an_adapted_clipped_linear(workspace: Any) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    assert gemma4_compat.status()["peft-clippable-linear"].state is gemma4_compat.PatchState.APPLIED
    model = get_peft_model(
        workspace.load(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    wrapper = next(module for module in model.modules() if is_wrapper(module) and hasattr(module.linear, "lora_A"))
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16, device=workspace.main)
    compiled = torch.compile(wrapper, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), wrapper(x))


def test_a_constructor_that_is_replaced_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whole graph each time. torch does not notice that a constructor was replaced: it has to be reset."""
    import torch

    def twice(original: Callable[..., Any], self: Any, value: Any) -> None:
        original(self, 2 * value)

    monkeypatch.syspath_prepend(tmp_path)
    core = "class Box:\n    def __init__(self, value):\n        self.value = value\n"
    library = Library.create(tmp_path, core=core).load()
    compiled = torch.compile(lambda x: library.Box(x).value + 1, backend="eager", fullgraph=True)
    x = torch.ones(3)
    for _ in range(2):
        edits = ChangeSet("a-patch")
        edits.replace(library.__name__, "Box.__init__", twice)
        assert compiled(x).tolist() == [3.0] * 3
        edits.undo()
        torch.compiler.reset()
        assert compiled(x).tolist() == [2.0] * 3
        torch.compiler.reset()


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_a_quantized_layer_after_a_round_trip_through_meta(workspace: Any, quantization: str) -> None:
    import torch

    assert gemma4_compat.status()["bitsandbytes-meta-quant-state"].state is gemma4_compat.PatchState.APPLIED
    layer = workspace.load(quantization).model.language_model.layers[0].mlp.up_proj
    data, offloaded = layer.weight.data, layer.weight.to("meta")
    layer.weight = type(layer.weight)(data, requires_grad=False, **vars(offloaded)).to(workspace.main)
    # Training mode, as in QLoRA: in eval mode bitsandbytes repacks on some CPUs, which upstream cannot trace either.
    layer.train()
    x = torch.randn(2, 5, layer.in_features, dtype=torch.bfloat16, device=workspace.main)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("training", [True, False])
def test_an_8bit_layer_after_a_round_trip_through_meta(workspace: Any, training: bool) -> None:
    import torch

    assert gemma4_compat.status()["bitsandbytes-int8-meta-scales"].state is gemma4_compat.PatchState.APPLIED
    layer = workspace.load("8bit").model.language_model.layers[0].mlp.up_proj.train(training)
    data, offloaded = layer.weight.data, layer.weight.to("meta")
    statistics = {"CB": offloaded.CB, "SCB": offloaded.SCB, "has_fp16_weights": offloaded.has_fp16_weights}
    layer.weight = type(layer.weight)(data, requires_grad=False, **statistics).to(workspace.main)
    x = torch.randn(2, 5, layer.in_features, dtype=torch.bfloat16, device=workspace.main)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(compiled(x), layer(x))


@pytest.mark.full
@pytest.mark.parametrize("split", [False, True])
def test_a_whole_model_with_an_adapter(workspace: Any, split: bool) -> None:
    import torch
    from peft import PeftModel

    adapter, batch = workspace.adapter("language"), workspace.inputs(text_only=True)
    reference = PeftModel.from_pretrained(workspace.load(), adapter).eval()
    model = PeftModel.from_pretrained(workspace.split() if split else workspace.load(), adapter).eval()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = reference(**batch).logits
        for _ in range(3):
            assert torch.equal(compiled(**batch).logits, expected)


@pytest.mark.full
def test_a_model_on_one_device_has_the_graphs_it_has_without_the_shim(workspace: Any) -> None:
    import torch

    def graphs() -> int:
        torch.compiler.reset()
        found = []

        def backend(graph: Any, _inputs: Any) -> Any:
            found.append(graph)
            return graph.forward

        with torch.no_grad():
            torch.compile(workspace.load(), backend=backend)(**workspace.inputs(text_only=True))
        return len(found)

    with_it = graphs()
    gemma4_compat.revert()
    try:
        without = graphs()
    finally:
        gemma4_compat.install()
    assert with_it == without
