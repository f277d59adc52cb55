"""A model drafts with its own first layers (F126)."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.generation.transformers_early_exit import PATCH
from tests.patches.promise import Promise

OPTIONS = {"max_new_tokens": 8, "do_sample": False}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"shape '\[.*\]' is invalid|has no attribute 'num_hidden_layers'|set of layer types"
    exact = False


def text(model: Any) -> Any:
    return getattr(model.model, "language_model", model.model)


def ran(model: Any) -> tuple[list[int], list[Any]]:
    """The layers that run from here on, and the handles of the hooks that note them."""
    found: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda _module, _args, index=index: found.append(index))
        for index, layer in enumerate(text(model).layers)
    ]
    return found, handles


@pytest.mark.parametrize("number", [1, 2, 5])
def test_drafts_run_the_first_layers(workspace: Any, number: int) -> None:
    import torch

    model, batch = workspace.load(), workspace.inputs()
    layers = text(model).layers
    expected = model.generate(**batch, **OPTIONS)
    found, handles = ran(model)
    tokens = model.generate(**batch, **OPTIONS, assistant_early_exit=number)
    for handle in handles:
        handle.remove()
    assert torch.equal(tokens, expected)
    assert found.count(0) > found.count(len(layers) - 1) > 1  # there were drafts, and a forward that checks them
    assert found.count(number - 1) == found.count(0)
    assert found.count(number) == found.count(len(layers) - 1)
    assert text(model).layers is layers


@pytest.mark.parametrize("offload", ["first", "both"])
def test_a_split_model(workspace: Any, offload: str) -> None:
    import torch

    expected = workspace.load().generate(**workspace.inputs(), **OPTIONS)
    model = workspace.dispatch(workspace.load()) if offload == "both" else workspace.split()
    for _ in range(2):
        assert torch.equal(model.generate(**workspace.inputs(), **OPTIONS, assistant_early_exit=3), expected)


@pytest.mark.full
@pytest.mark.parametrize("variant", variants.NAMES)
def test_every_variant(variant: str, tmp_path: Any) -> None:
    import torch

    from gemma4_compat import Gemma4CompatError
    from gemma4_compat._lab.workspace import Workspace

    try:
        tiny_models.build_checkpoint(tmp_path / "model", variant=variant)
    except Gemma4CompatError as error:
        pytest.skip(str(error))
    model = tiny.load(tmp_path / "model").float()
    (tmp_path / "variant").write_text(variant, encoding="utf-8")
    batch = Workspace(tmp_path).inputs(text_only=True)
    expected = model.generate(**batch, **OPTIONS)
    for number in range(1, len(text(model).layers) + 1):
        assert torch.equal(model.generate(**batch, **OPTIONS, assistant_early_exit=number), expected)


def test_after_an_error_every_layer_runs(workspace: Any) -> None:
    import torch

    model, batch = workspace.load(), workspace.inputs(text_only=True)
    expected = model.generate(**batch, **OPTIONS)
    layers = text(model).layers

    def fail(*_: Any) -> None:
        if len(text(model).layers[:99]) < len(layers):
            raise KeyboardInterrupt

    handle = layers[0].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.generate(**batch, **OPTIONS, assistant_early_exit=3)
    handle.remove()
    assert text(model).layers is layers
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)


def test_other_threads_run_every_layer(workspace: Any) -> None:
    import threading

    import torch

    model, batch = workspace.load(), workspace.inputs(text_only=True)
    with torch.no_grad():
        expected = model(**batch).logits
    found = []

    def other(*_: Any) -> None:
        def run() -> None:
            with torch.no_grad():
                found.append(model(**batch).logits)

        if not found and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(60)

    handle = text(model).norm.register_forward_pre_hook(other)
    model.generate(**batch, **OPTIONS, assistant_early_exit=2)
    handle.remove()
    assert torch.equal(found[0], expected)


def test_decode_fast(workspace: Any) -> None:
    import torch

    import gemma4_compat

    model, batch = workspace.load(), workspace.inputs(text_only=True)
    expected = model.generate(**batch, **OPTIONS)
    gemma4_compat.decode_fast(model)
    for _ in range(2):
        assert torch.equal(model.generate(**batch, **OPTIONS, assistant_early_exit=3), expected)
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
