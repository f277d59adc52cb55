"""peft-prefix-placement: prefix tuning on a split model, in forwards, generates and training."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.adapters import peft_prefix_placement
from gemma4_compat.patches.adapters.peft_prefix_placement import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise

VIRTUAL = 3
affected = pytest.mark.skipif(not is_affected(PATCH), reason="this PEFT has no prefix for layers of several widths")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"AttributeError: 'Gemma4(Unified)?Config' object has no attribute 'num_hidden_layers'"


@pytest.fixture
def tuned(workspace: Any) -> Callable[..., Any]:
    """Builds a model with a prefix, of a variant of the text model, multimodal or text alone, split or not."""

    def build(
        variant: str, kind: str = "PrefixTuningConfig", *, text: bool = False, offload: str | None = None
    ) -> Any:
        import peft
        import torch

        folder = workspace.cached(
            tiny_models.build_text_checkpoint if text else tiny_models.build_checkpoint, text_variant=variant
        )
        model = tiny.load(folder, cls="Gemma4ForCausalLM" if text else "Gemma4ForConditionalGeneration")
        if offload is not None and text:
            names = [f"model.layers.{index}" for index in range(len(model.get_decoder().layers))]
            away = dict.fromkeys(names[::2], workspace.offloaded)
            model = workspace.dispatch_map(model, {"": workspace.main, **away})
        elif offload is not None:
            model = workspace.dispatch(model, offload)
        torch.manual_seed(0)
        config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
        return peft.get_peft_model(model, config).eval()

    return build


SPLITS = [
    *((variant, False, offload) for variant in ("E2B", "26B-A4B", "31B") for offload in ("layers", "towers", "both")),
    *((variant, True, "layers") for variant in ("E2B", "26B-A4B", "31B")),
]


@affected
@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "CartridgeConfig"])
@pytest.mark.parametrize("variant, text, offload", SPLITS)
def test_forwards_and_generates_are_those_of_one_device(
    tuned: Callable[..., Any], workspace: Any, kind: str, variant: str, text: bool, offload: str
) -> None:
    whole, split = tuned(variant, kind, text=text), tuned(variant, kind, text=text, offload=offload)
    expected = workspace.outputs(whole, text_only=True)
    assert difference(expected, workspace.outputs(split, text_only=True)) == 0.0
    plain = workspace.outputs(whole.get_base_model(), text_only=True)
    assert difference(expected, plain) > 0.01, "the prefix changes nothing"


@affected
@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_the_prefix_is_trained_as_on_one_device(tuned: Callable[..., Any], workspace: Any, variant: str) -> None:
    import torch

    batch = tiny.inputs(workspace.main, text_only=True)
    found = []
    for offload in (None, "both"):
        model = tuned(variant, offload=offload)
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        gradients = [value.grad for value in model.parameters() if value.requires_grad]
        assert gradients
        assert all(gradient.abs().max() > 0 for gradient in gradients)
        found.append((loss.detach(), *gradients))
    assert all(map(torch.equal, *found))


@affected
def test_each_prefix_is_where_its_layer_computes(tuned: Callable[..., Any], workspace: Any) -> None:
    """On a CPU every device is the same; ``meta`` is another one, and nothing is computed there."""
    model = tuned("31B", offload="both")
    cache = model.get_prompt(batch_size=1)
    main = "cpu" if workspace.main == "cpu" else "cuda"
    assert set(devices(cache)) == {main}
    projection = model.get_base_model().get_decoder().layers[1].self_attn.q_proj.to("meta")
    if hasattr(projection, "_hf_hook"):
        projection._hf_hook.execution_device = "meta"
    peft_prefix_placement.map_cache(lambda *_: pytest.fail("upstream was asked"), model.get_base_model(), cache)
    assert devices(cache) == [main, "meta", *[main] * (len(devices(cache)) - 2)]
    assert cache.layers[1].values.device.type == cache.layers[1].device.type == "meta"


def devices(cache: Any) -> list[str]:
    """The kinds of device that the keys of its layers are on."""
    return [layer.keys.device.type for layer in cache.layers if getattr(layer, "keys", None) is not None]


@pytest.mark.parametrize("model_type, split", [("llama", True), ("gemma4", False)])
def test_another_model_and_one_without_a_map_are_left_to_upstream(model_type: str, split: bool) -> None:
    from transformers import DynamicCache

    model, cache = SimpleNamespace(config=SimpleNamespace(model_type=model_type)), DynamicCache()
    if split:
        model.hf_device_map = {"": "cpu"}
    asked = []
    peft_prefix_placement.map_cache(lambda *arguments: asked.append(arguments), model, cache)
    assert asked == [(model, cache)]
