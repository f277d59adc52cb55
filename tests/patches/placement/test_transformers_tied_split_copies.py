"""F44: ``tie_weights`` where the embedding has a trainable copy (``modules_to_save``): upstream ties the copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import pairwise
from tests.patches.placement.splits import EMBEDDING, HEAD, KINDS, split


def with_copy(model: Any, name: str = "first") -> Any:
    """An adapter whose copy of the embedding is not the embedding."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
        model.set_adapter(name)
    else:
        model = get_peft_model(model, config, adapter_name=name)
    weight = embedding(model).modules_to_save[name].weight
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        weight.add_((0.1 * torch.randn(weight.shape, generator=generator)).to(weight.dtype))
    return model.eval()


def embedding(model: Any) -> Any:
    return model.get_base_model().get_input_embeddings()


class Life:
    """What a user does with a model, and what the model answers; ``place`` splits a model, or does not."""

    def __init__(self, place: Callable[[Any], Any]) -> None:
        self.place = place
        self.answers: list[dict[str, Any]] = []

    def ask(self, model: Any) -> None:
        import torch

        with torch.no_grad():
            self.answers.append({"logits": model(**batch()).logits})

    def train(self, model: Any) -> None:
        import torch

        model(**batch(), labels=batch()["input_ids"]).loss.backward()
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.answers.append({name: weight.grad.clone() for name, weight in trained.items() if weight.grad is not None})
        torch.optim.SGD(trained.values(), lr=0.05).step()
        model.zero_grad(set_to_none=True)
        self.ask(model)


def batch() -> dict[str, Any]:
    import torch

    ids = torch.tensor([[2, 5, 9, 17, 33, 4]])
    return {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids)}


def trained_and_deleted(life: Life, model: Any) -> Any:
    model = with_copy(model)
    base = model.get_base_model()  # what PEFT leaves of a model without adapters
    base.tie_weights()
    life.ask(model)
    life.train(model)
    model.delete_adapter("first")  # the head keeps the copy's weight
    life.ask(base)
    base.tie_weights()
    return base


def two_copies(life: Life, model: Any) -> Any:
    model = with_copy(model)
    model.get_base_model().tie_weights()
    model = with_copy(model, "second")
    life.train(model)  # of the second copy, and of the head with the first
    model.get_base_model().tie_weights()
    life.train(model)
    with model.disable_adapter():
        model.get_base_model().tie_weights()
        life.ask(model)
    for name in ("first", "second"):  # neither has become the embedding
        model.set_adapter(name)
        life.ask(model)
    return model


def resized_to_the_same(life: Life, model: Any) -> Any:
    model = with_copy(model)
    model.resize_token_embeddings(model.config.get_text_config().vocab_size)
    life.train(model)
    model.merge_adapter()
    life.ask(model)
    return model


def unloaded(life: Life, model: Any) -> Any:
    model = with_copy(model)
    model.get_base_model().tie_weights()
    model = model.merge_and_unload()
    life.ask(model)
    model.tie_weights()
    return model


def unwrapped_and_resized(life: Life, model: Any) -> Any:
    import torch

    model = with_copy(model)
    base = model.get_base_model()
    base.tie_weights()
    model.delete_adapter("first")
    base.set_input_embeddings(base.get_input_embeddings().original_module)
    life.ask(base)
    torch.manual_seed(0)
    base.resize_token_embeddings(base.config.get_text_config().vocab_size + 8, mean_resizing=False)
    return base


def loaded(life: Life, model: Any) -> Any:
    import torch

    model = with_copy(model)
    base = model.get_base_model()
    base.tie_weights()
    state = {name: value for name, value in base.state_dict().items() if name.endswith("original_module.weight")}
    assert len(state) == 1
    new = {name: torch.full(value.shape, 0.01, dtype=value.dtype) for name, value in state.items()}
    base.load_state_dict(new, strict=False)  # not the head's
    life.ask(model)
    with torch.no_grad():
        head = {"lm_head.weight": 0.5 * base.lm_head.weight}
    base.load_state_dict(head, strict=False)  # and the copy's
    life.ask(model)
    with model.disable_adapter():
        life.ask(model)
    return model


def copied(life: Life, model: Any) -> Any:
    model = with_copy(model)
    model.get_base_model().tie_weights()
    second = copy.deepcopy(model)
    life.train(second)
    life.ask(model)
    base = second.get_base_model()
    second.delete_adapter("first")
    base.tie_weights()
    life.ask(base)
    return model.float()


def dispatched_again(life: Life, model: Any) -> Any:
    from accelerate.hooks import remove_hook_from_module

    model = with_copy(model)
    base = model.get_base_model()
    base.tie_weights()
    for _ in range(2):
        remove_hook_from_module(base, recurse=True)
        life.place(base)
        life.train(model)
    model.delete_adapter("first")
    life.ask(base)
    base.tie_weights()
    return base


def unloaded_and_dispatched(life: Life, model: Any) -> Any:
    import torch
    from accelerate.hooks import remove_hook_from_module

    model = with_copy(model)
    model.get_base_model().tie_weights()
    model = model.merge_and_unload()  # the copy is the embedding now, and the head is tied to it
    remove_hook_from_module(model, recurse=True)
    life.place(model)
    life.ask(model)
    weight = torch.full_like(model.state_dict()[f"{EMBEDDING}.weight"], 0.01, device="cpu")
    model.load_state_dict({f"{EMBEDDING}.weight": weight}, strict=False)
    return model


LIVES = [
    trained_and_deleted,
    two_copies,
    resized_to_the_same,
    unloaded,
    unwrapped_and_resized,
    loaded,
    copied,
    dispatched_again,
    unloaded_and_dispatched,
]


@pytest.fixture(scope="module")
def expected(workspace: Any) -> Callable[[Any], list[Any]]:
    known: dict[Any, list[Any]] = {}

    def answers(lived: Any) -> list[Any]:
        if lived not in known:
            life = Life(lambda model: model)
            life.ask(lived(life, workspace.load()))
            known[lived] = life.answers
        return known[lived]

    return answers


@pytest.mark.parametrize(
    ("lived", "kind", "offloaded"),
    pairwise(LIVES, KINDS, [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_head_is_tied_to_the_copy(
    workspace: Any,
    expected: Callable[[Any], list[Any]],
    tmp_path: Path,
    lived: Any,
    kind: str,
    offloaded: tuple[str, ...],
) -> None:
    import tempfile

    import torch

    def place(model: Any) -> Any:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return split(workspace, "disk" if kind == "from_pretrained" else kind, offloaded, folder, model=model)

    model = split(workspace, kind, offloaded, tmp_path)
    life = Life(place)
    life.ask(lived(life, model))
    assert len(life.answers) == len(expected(lived))
    for number, (first, second) in enumerate(zip(expected(lived), life.answers)):
        assert first.keys() == second.keys(), number
        for name, value in first.items():
            assert torch.equal(value, second[name]), (number, name)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_offloaded_again_with_the_base_weight(workspace: Any, tmp_path: Path, kind: str) -> None:
    model = with_copy(split(workspace, kind, (EMBEDDING, HEAD), tmp_path))
    head = model.get_base_model().lm_head
    model.get_base_model().tie_weights()
    assert head.weight is embedding(model).modules_to_save["first"].weight
    model(**batch())
    with model.disable_adapter():
        model.get_base_model().tie_weights()
    assert head.weight.device.type == "meta"
    model(**batch())
    assert head.weight.device.type == "meta"
    assert not head.weight.requires_grad
