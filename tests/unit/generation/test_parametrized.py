"""Parametrized weights (``torch.nn.utils.parametrize``) in replayed steps, wherever the weights are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch
from torch.nn.utils import parametrizations, parametrize

import gemma4_compat
from gemma4_compat._kernels import kernels
from tests.unit.generation.calls import (
    TABLE,
    Models,
    ask,
    assert_equal,
    base,
    compared,
    differ,
    generate,
    layers,
    steps,
)
from tests.unit.generation.calls import text as prompt

pytestmark = pytest.mark.usefixtures("tapes")


class Negated(torch.nn.Module):
    def forward(self, weight: Any) -> Any:
        return -weight


def parametrized(model: Any) -> Any:
    """A linear layer, with or without an adapter, a norm and the table of embeddings."""
    linear = layers(model)[1].mlp.up_proj
    parametrizations.weight_norm(getattr(linear, "base_layer", linear))
    for module in (layers(model)[2].input_layernorm, base(model).get_submodule(TABLE)):
        parametrize.register_parametrization(module, "weight", Negated())
    return model.eval()


@pytest.mark.parametrize("adapter", [None, "language"])
def test_replays_have_the_bits_of_the_same_weights_on_one_device(models: Models, adapter: str | None) -> None:
    found = {}
    for where in ("device", "host", "streamed"):
        model = models.fresh(None, adapter, where)
        before = compared(model, ask(model))
        after = compared(parametrized(model), ask(model))
        assert differ(before, after)
        linear = layers(model)[1].mlp.up_proj
        next(getattr(linear, "base_layer", linear).parametrizations.weight.parameters()).data.mul_(-2)
        captured = steps(model).captured
        changed = compared(model, ask(model))
        assert differ(after, changed)
        assert steps(model).captured == captured  # a graph reads what was changed in place
        assert steps(model).reasons == ()
        found[where] = before + after + changed
    for where in ("host", "streamed"):
        for one, other in zip(found["device"], found[where], strict=True):
            assert_equal(one, other)


@pytest.mark.full
def test_custom_kernels_have_the_same_bits_wherever_they_are(models: Models, on_host: kernels.Kernels) -> None:
    found = []
    for where in ("device", "host", "streamed"):
        model = gemma4_compat.decode_fast(models.fresh(None, None, where))
        generate(model, prompt(model))
        found.append(generate(parametrized(model), prompt(model), new=8))
        assert steps(model).reasons == ()
    for other in found[1:]:
        assert_equal(found[0], other)


def test_weights_that_are_cached_for_a_while_are_not_captured(models: Models) -> None:
    """In ``parametrize.cached()`` a weight is computed once, in memory that is given back at the end."""
    model = parametrized(models.fresh(None))
    with parametrize.cached():
        first = compared(model, ask(model), replays=False)
    assert any("parametrize.cached" in reason for reason in steps(model).reasons), steps(model)
    next(layers(model)[1].mlp.up_proj.parametrizations.weight.parameters()).data.mul_(-2)
    after = compared(model, ask(model))
    assert differ(first, after)
    with parametrize.cached():
        compared(model, ask(model), replays=False)
