"""Adapters are as trainable after ``disable_adapter()`` as before (F121)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from gemma4_compat._lab import tiny_adapters
from gemma4_compat.patches.adapters.peft_frozen_adapters import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"\d+ weights of a frozen adapter are trainable"
    exact = False


def trainable(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def disabled(model: Any) -> None:
    """Disable and enable in every way: an error, contexts in one another, twice."""
    with contextlib.suppress(KeyError), model.disable_adapter():
        assert not trainable(model)
        raise KeyError
    with model.disable_adapter(), model.disable_adapter():
        pass
    for _ in range(2):
        model.base_model.disable_adapter_layers()
    for _ in range(2):
        model.base_model.enable_adapter_layers()


TUNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"modules_to_save": ["lm_head"]}),
    "dora": ("LoraConfig", {"use_dora": True}),
    "tokens": ("LoraConfig", {"trainable_token_indices": {"embed_tokens": [4, 5]}}),
    "norms": ("LNTuningConfig", {"target_modules": r".*language_model.*\.input_layernorm"}),
    "ia3": ("IA3Config", {"feedforward_modules": []}),
    "vectors": ("VBLoRAConfig", {"vector_length": 32}),
    "oft": ("OFTConfig", {"oft_block_size": 32}),
    "loha": ("LoHaConfig", {}),
    "vera": ("VeraConfig", {}),
    "unilora": ("UniLoraConfig", {}),  # all layers share its weight
}


@pytest.mark.parametrize(
    "tuner", [*list(TUNERS)[:4], *(pytest.param(one, marks=pytest.mark.full) for one in list(TUNERS)[4:])]
)
def test_what_was_trainable_is_trainable_again(workspace: Any, tuner: str) -> None:
    import peft

    kind, options = TUNERS[tuner]
    if not hasattr(peft, kind):
        pytest.skip(f"this release of PEFT has no {kind}")
    config = getattr(peft, kind)(**{"target_modules": tiny_adapters.SOME_LINEARS, **options})
    model = peft.get_peft_model(workspace.load(), config)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for keep in (lambda _: True, lambda index: index % 2, lambda _: False):
        for index, weight in enumerate(weights):
            weight.requires_grad_(bool(keep(index)))
        before = trainable(model)
        disabled(model)
        assert trainable(model) == before


def test_what_set_adapter_says_meanwhile_holds(workspace: Any) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load(), workspace.adapter("language"), adapter_name="one")
    model.load_adapter(str(workspace.adapter("language")), "other")
    with model.disable_adapter():
        model.set_adapter("other")
    assert trainable(model)
    assert all(".other." in name for name in trainable(model))
    with model.disable_adapter():
        model.set_adapter(
            "other", **({"inference_mode": True} if "inference_mode" in _parameters(model.set_adapter) else {})
        )
    model.set_adapter("one")
    disabled(model)
    assert trainable(model)
    assert all(".one." in name for name in trainable(model))


def _parameters(function: Any) -> Any:
    import inspect

    return inspect.signature(function).parameters


def test_in_transformers(workspace: Any) -> None:
    for wanted in (False, True):
        model = workspace.load()
        model.load_adapter(str(workspace.adapter("language")), is_trainable=wanted)
        before = trainable(model)
        assert bool(before) is wanted
        model.disable_adapters()
        model.enable_adapters()
        assert trainable(model) == before
