"""F112: ``offload`` and ``every_n_layers`` among checkpointing's keyword arguments, and ``offload`` without a GPU."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._plan import training_step
from gemma4_compat.patches.training.transformers_checkpointing_options import OPTIONS, PATCH
from tests.conftest import is_affected
from tests.helpers import without
from tests.patches.promise import Promise

AFFECTED = pytest.mark.skipif(not is_affected(PATCH), reason="since 5.16 transformers has such options")
OFFLOADS = pytest.mark.skipif(
    not versions.admits(">=5.17", versions.installed("transformers") or "0"), reason="since 5.17 transformers offloads"
)
PLAIN = {"use_reentrant": False}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"every_n_layers=2 among the keyword arguments: (\d+) of \1 layers are computed again"


def enable(model: Any, given: dict[str, Any] | None, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the name, from 5.23 on
        model.train().gradient_checkpointing_enable(given, **options)
    return model


def step(model: Any, batch: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """Runs of each decoder layer's attention, and the loss with all gradients."""
    layers = model.get_decoder().layers
    runs = [0] * len(layers)
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda *_, at=at: runs.__setitem__(at, runs[at] + 1))
        for at, layer in enumerate(layers)
    ]
    model.zero_grad()
    loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    return runs, [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 10
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def by_method(model: Any, given: dict[str, Any]) -> Any:
    return enable(model, given)


def by_peft(model: Any, given: dict[str, Any]) -> Any:
    from peft import prepare_model_for_kbit_training

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=given).train()


def by_adapter(model: Any, given: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=training_step.TARGETS))
    return enable(adapted, given).get_base_model().requires_grad_(True)


WAYS: list[Callable[[Any, dict[str, Any]], Any]] = [by_method, by_peft, by_adapter]


@AFFECTED
@pytest.mark.parametrize("way", WAYS)
def test_every_second_layer(workspace: Any, way: Callable[[Any, dict[str, Any]], Any]) -> None:
    """What is computed again is what the argument of that name says, and no bit changes."""
    batch, given = workspace.inputs(text_only=True), {**PLAIN, "every_n_layers": 2}
    asked = dict(given)
    quantization = "4bit" if way is by_peft else None
    runs, found = step(way(workspace.load(quantization), given), batch)
    assert given == asked
    expected_runs, expected = step(enable(workspace.load(), PLAIN, every_n_layers=2), batch)
    assert runs == expected_runs
    assert sorted(set(runs)) == [1, 2]
    if way is by_method:
        assert_same(found, expected)
    with without(PATCH.id):
        runs, _ = step(way(workspace.load(quantization), given), batch)
    assert set(runs) == {2}


@AFFECTED
def test_an_argument_of_its_own_wins(workspace: Any) -> None:
    batch = workspace.inputs(text_only=True)
    runs, _ = step(enable(workspace.load(), {**PLAIN, "every_n_layers": 6}, every_n_layers=2), batch)
    assert runs == [2, 1] * (len(runs) // 2)


@OFFLOADS
@pytest.mark.parametrize("given", [{**PLAIN, "offload": True}, {"offload": True}])
def test_offloading_is_asked_for(workspace: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Beside a stand-in for an accelerator, what each layer's checkpoint keeps goes through ``save_on_cpu``."""
    import torch

    asked: list[bool] = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool = False, device_type: str = "cuda") -> None:
            super().__init__(lambda one: one, lambda one: one)
            asked.append(pin_memory)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Recorded)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    batch = workspace.inputs(text_only=True)
    model = enable(workspace.load(), given)
    runs, _ = step(model, batch)
    assert set(runs) == {2}
    assert asked.count(True) >= len(runs)
    asked.clear()
    step(enable(model, PLAIN), batch)
    assert not asked


@OFFLOADS
def test_without_an_accelerator_nothing_is_offloaded(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    batch = workspace.inputs(text_only=True)
    expected = step(enable(workspace.load(), PLAIN), batch)
    for given, options in (({**PLAIN, "offload": True}, {}), (PLAIN, {"offload": True}), (None, {"offload": True})):
        runs, found = step(enable(workspace.load(), given, **options), batch)
        assert runs == expected[0]
        assert_same(found, expected[1])


@OFFLOADS
def test_undone_offloading_without_an_accelerator_raises_the_original_error(workspace: Any) -> None:
    import torch

    if torch.accelerator.is_available():
        pytest.skip("this machine has pinned memory")
    batch = workspace.inputs(text_only=True)
    with without(PATCH.id), pytest.raises(RuntimeError, match="pin_memory=True requires a CUDA"):
        step(enable(workspace.load(), PLAIN, offload=True), batch)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**config, vocab_size=64))


@AFFECTED
@pytest.mark.parametrize(
    "given", [None, {}, PLAIN, {"use_reentrant": True}, {"preserve_rng_state": False}, {"determinism_check": "none"}]
)
def test_other_dictionaries_are_upstreams(given: dict[str, Any] | None) -> None:
    """An empty one too, which ``peft.prepare_model_for_kbit_training`` passes: it leaves PyTorch its defaults."""

    def passed_on() -> dict[str, Any]:
        found: dict[str, Any] = enable(llama(), given).model.layers[0]._gradient_checkpointing_func.keywords
        return found

    found = passed_on()
    with without(PATCH.id):
        assert found == passed_on() == ({"use_reentrant": False} if given is None else given)


@AFFECTED
def test_another_model() -> None:
    import torch

    model = llama()
    batch = {"input_ids": torch.arange(3, 12)[None]}
    runs, _ = step(enable(model, {**PLAIN, "every_n_layers": 2}), batch)
    assert sum(runs) == 6
    with without(PATCH.id):
        assert sum(step(enable(model, {**PLAIN, "every_n_layers": 2}), batch)[0]) == 8


def test_the_options_are_those_of_trainer() -> None:
    """Trainer takes the same keys out of the dictionary, with the same defaults."""
    import transformers

    source = inspect.getsource(transformers.Trainer)
    for option, default in OPTIONS.items():
        if option in inspect.signature(transformers.PreTrainedModel.gradient_checkpointing_enable).parameters:
            assert f'.pop("{option}", {default})' in source
