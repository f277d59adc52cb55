"""F38 and F42: an adapter with weights of its own for the embedding or the head, one of which is offloaded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import pairwise
from tests.patches.adapters import tied_halves
from tests.patches.adapters.tied_halves import HALVES, LAYERS, PLACES

ADAPTERS: dict[str, dict[str, Any]] = {
    "copied embedding": {"modules_to_save": ["embed_tokens"]},
    "copied head": {"modules_to_save": ["lm_head"]},
    "both copied": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tied copies": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": {"embed_tokens": [5, 9, 60]}},
    "tokens of the head": {"trainable_token_indices": {"lm_head": [5, 9, 60]}},
}


def config(adapter: str) -> Any:
    from peft import LoraConfig

    options = ADAPTERS[adapter]
    known = {name: value for name, value in options.items() if name in LoraConfig.__dataclass_fields__}
    if known != options:
        pytest.skip("this release of PEFT has no ensure_weight_tying")
    return LoraConfig(r=4, target_modules=LAYERS, **options)


@functools.cache
def saved_adapter(workspace: Any, adapter: str) -> Path:
    from peft import get_peft_model

    folder: Path = workspace.folder / f"tied-{adapter.replace(' ', '-')}"
    tied_halves.perturbed(get_peft_model(workspace.load(), config(adapter))).save_pretrained(folder)
    return folder


def loaded(workspace: Any, model: Any, adapter: str, by: str) -> list[Any]:
    """Outputs with the adapter loaded, without it, with it again; and, of a PEFT model, what it saves."""
    from peft import PeftModel

    folder = saved_adapter(workspace, adapter)
    if by == "model.load_adapter":
        model.load_adapter(str(folder))
        found = [tied_halves.logits(workspace, model)]
        model.disable_adapters()
        found.append(tied_halves.logits(workspace, model))
        model.enable_adapters()
        return [*found, tied_halves.logits(workspace, model)]
    model = PeftModel.from_pretrained(model, folder)
    found = [tied_halves.logits(workspace, model), tied_halves.saved(workspace, model)]
    with model.disable_adapter():
        found.append(tied_halves.logits(workspace, model))
    return [*found, tied_halves.logits(workspace, model)]


def trained(workspace: Any, model: Any, adapter: str) -> list[Any]:
    import torch
    from peft import get_peft_model

    torch.manual_seed(0)
    model = tied_halves.perturbed(get_peft_model(model, config(adapter)))
    losses = tied_halves.trained(workspace, model)
    return [losses, tied_halves.logits(workspace, model), tied_halves.saved(workspace, model)]


@functools.cache
def expected(workspace: Any, operation: Any, *arguments: str) -> list[Any]:
    """What one device gives."""
    return operation(workspace, workspace.load(), *arguments)


@pytest.mark.parametrize(
    ("adapter", "half", "place", "ran"), pairwise(list(ADAPTERS), list(HALVES), PLACES, [False, True])
)
def test_is_loaded_and_trained_as_on_one_device(
    workspace: Any, adapter: str, half: str, place: str, ran: bool
) -> None:
    for operation, *arguments in (
        (loaded, adapter, "PeftModel"),
        (loaded, adapter, "model.load_adapter"),
        (trained, adapter),
    ):
        model = tied_halves.split(workspace, place, HALVES[half])
        if ran:
            tied_halves.logits(workspace, model)
        found = operation(workspace, model, *arguments)
        assert tied_halves.same(expected(workspace, operation, *arguments), found), (operation, arguments)
