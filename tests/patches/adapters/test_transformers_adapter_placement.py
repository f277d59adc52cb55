"""F3 and F13 through transformers' own adapter integration."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from gemma4_compat._lab import tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters.transformers_adapter_placement import PATCH
from tests.patches.adapters import tied_halves
from tests.patches.adapters.test_peft_keep_dispatch import lora_devices, placement
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"LoRA weights are on meta|Expected all tensors to be on the same device"


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_load_adapter_twice(workspace: Any, quantization: str | None) -> None:
    outputs = []
    for base in (workspace.load(quantization), workspace.split(quantization)):
        before = placement(base)
        for name in ("all", "towers"):
            base.load_adapter(str(workspace.adapter(name)), adapter_name=name)
            assert placement(base) == before
        assert lora_devices(base) == {"cpu" if workspace.main == "cpu" else "cuda"}
        for name in ("all", "towers"):
            base.set_adapter(name)
            outputs.append(workspace.outputs(base))
    assert difference(outputs[0], outputs[2]) == 0.0
    assert difference(outputs[1], outputs[3]) == 0.0
    assert difference(outputs[0], outputs[1]) > 0.0


def test_add_adapter_creates_it_where_the_layers_compute(workspace: Any) -> None:
    from peft import LoraConfig

    base = workspace.split()
    before = placement(base)
    base.add_adapter(LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["all"]))
    assert placement(base) == before
    assert lora_devices(base) == {"cpu" if workspace.main == "cpu" else "cuda"}


def test_a_load_that_fails_gives_the_map_back(workspace: Any, tmp_path: Any) -> None:
    base = workspace.split()
    before = placement(base)
    with pytest.raises((ValueError, OSError)):
        base.load_adapter(str(tmp_path))
    assert placement(base) == before


@functools.cache
def adapter_with_embeddings(workspace: Any, factor: float) -> str:
    """One on embedding and head, saved with their base weights, which are those of the base times ``factor``."""
    import torch

    model = workspace.load()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(factor)
    folder = workspace.folder / f"with-embeddings-{factor}"
    return str(tiny_adapters.write_adapter(model, ["embed_tokens", "lm_head"], folder))


def loaded(workspace: Any, model: Any, factor: float) -> list[Any]:
    """Logits, and which of the base's weights learn, after each of two loads, and once hooks are removed."""
    import torch
    from accelerate.hooks import remove_hook_from_module

    found = []

    def note() -> None:
        found.append(tied_halves.logits(workspace, model))
        names = [name for name, value in model.named_parameters() if value.requires_grad and "lora_" not in name]
        found.append(torch.tensor([sum(map(ord, name)) for name in names]))

    tied_halves.logits(workspace, model)
    model.load_adapter(adapter_with_embeddings(workspace, factor), adapter_name="a")
    note()
    model.load_adapter(str(workspace.adapter("language")), adapter_name="b")
    note()
    remove_hook_from_module(model, recurse=True)
    note()
    return found


@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("place", tied_halves.PLACES)
@pytest.mark.parametrize("half", tied_halves.HALVES)
def test_an_adapter_brings_the_embeddings_of_its_base(workspace: Any, half: str, place: str, factor: float) -> None:
    import torch

    split = tied_halves.split(workspace, place, tied_halves.HALVES[half])
    whole = workspace.load()
    before = tied_halves.logits(workspace, whole)
    expected = loaded(workspace, whole, factor)
    for first, second in zip(expected, loaded(workspace, split, factor), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(before, expected[2])
