"""A weight that is parametrized while it is offloaded has the values of the same weight on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from gemma4_compat import Gemma4CompatError
from gemma4_compat._offload.transfer import streaming


def negated(module: Any) -> None:
    import torch

    class Negated(torch.nn.Module):
        def forward(self, weight: Any) -> Any:
            return -weight

    torch.nn.utils.parametrize.register_parametrization(module, "weight", Negated())


def weight_norm(module: Any) -> None:
    import torch

    torch.nn.utils.parametrizations.weight_norm(module)


def twice(module: Any) -> None:
    """Only the first one is asked for an inverse; without one, torch begins with the weight."""
    import torch

    class Shifted(torch.nn.Module):
        def forward(self, weight: Any) -> Any:
            return 2 * weight + 1

        def right_inverse(self, weight: Any) -> Any:
            return weight / 4

    class Without(torch.nn.Module):
        def forward(self, weight: Any) -> Any:
            return -weight

        def right_inverse(self, weight: Any) -> Any:
            raise NotImplementedError

    torch.nn.utils.parametrize.register_parametrization(module, "weight", Without())
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Shifted())


KINDS = {"one of the user's": negated, "weight norm": weight_norm, "two, one after the other": twice}


def toy() -> Any:
    import torch

    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3))

    class Toy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(10, 8)
            self.layers = layers
            self.head = torch.nn.Linear(8, 10)

        def forward(self, tokens: Any) -> Any:
            states = self.table(tokens)
            for layer in self.layers:
                states = layer(states)
            return self.head(states)

    return Toy().requires_grad_(False).eval()


def dispatched(place: str, folder: Path, *, streamed: bool) -> Any:
    import torch
    from accelerate import dispatch_model

    model = toy()
    names = ["table", "head", *(f"layers.{index}" for index in range(3))]
    model = dispatch_model(
        model, dict.fromkeys(names, place), main_device=torch.device("cpu"), offload_dir=str(folder), force_hooks=True
    )
    if streamed:
        assert streaming.install(model) == 3
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("before", [True, False], ids=["before the first forward", "between two"])
def test_it_is_computed_from_the_stored_weight(
    tmp_path: Path, kind: str, place: str, streamed: bool, before: bool
) -> None:
    import torch

    tokens = torch.tensor([[1, 2, 3]])
    model, expected = dispatched(place, tmp_path, streamed=streamed), toy()
    if not before:
        assert torch.equal(model(tokens), expected(tokens))
    for changed in (model, expected):
        for module in (changed.layers[1][0], changed.head, changed.table):
            KINDS[kind](module)
    for _ in range(2):
        assert torch.equal(model(tokens), expected(tokens))
    originals = model.layers[1][0].parametrizations.weight.parameters()
    assert all(original.device.type == "cpu" and not original.requires_grad for original in originals)
    for changed in (model, expected):  # the user's from then on
        next(changed.layers[1][0].parametrizations.weight.parameters()).mul_(3)
    assert torch.equal(model(tokens), expected(tokens))
    assert model.layers[0][0].weight.device.type == "meta"


@pytest.mark.parametrize("streamed", [True, False])
def test_what_computed_a_state_from_no_values_is_refused(tmp_path: Path, streamed: bool) -> None:
    import torch

    model = dispatched("cpu", tmp_path, streamed=streamed)
    torch.nn.utils.parametrizations.spectral_norm(model.layers[1][0])
    with pytest.raises(Gemma4CompatError, match="'weight' of a ParametrizedLinear was parametrized \\(_SpectralNorm"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_submodule_that_only_has_the_name_is_left_alone(tmp_path: Path) -> None:
    import torch

    model, expected = dispatched("cpu", tmp_path, streamed=True), toy()
    for changed in (model, expected):
        changed.layers[1][0].parametrizations = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens), expected(tokens))
