"""F109: ``generate`` in training mode with gradient checkpointing has the bits of ``eval()`` mode."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.state import checkpointing
from gemma4_compat.patches.training.transformers_generate_checkpointing import PATCH
from tests.conftest import is_affected
from tests.helpers import child, pairwise, without
from tests.patches.promise import Promise

AFFECTED = pytest.mark.skipif(not is_affected(PATCH), reason="since 5.24 transformers asks for gradients itself")
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5}
KEPT = {"return_dict_in_generate": True, "output_logits": True}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"^with checkpointing in training mode the logits of generate are off by \d"


def trained(model: Any, reentrant: bool = False) -> Any:
    """The same model, in training mode and with checkpointing."""
    model.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a reentrant one for shared keys, and of the name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def generate(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    import torch

    torch.manual_seed(3)
    return model.generate(**batch, **OPTIONS, **KEPT, **options)


def assert_same(found: Any, expected: Any) -> None:
    import torch

    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == len(expected.logits) >= 5
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.equal(one, other)


def calls(model: Any) -> list[int]:
    """Runs of each decoder layer's attention from now on."""
    layers = model.get_decoder().layers
    counted = [0] * len(layers)
    for index, layer in enumerate(layers):
        layer.self_attn.register_forward_pre_hook(
            lambda *_, index=index: counted.__setitem__(index, counted[index] + 1)
        )
    return counted


def gradients(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "none": {"use_cache": False},
    "beams": {"num_beams": 2},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize(
    ("way", "reentrant", "dtype", "media"),
    pairwise([*WAYS], [False, True], ["bfloat16", "float32"], [False, True]),
)
def test_tokens_and_logits_have_the_bits_of_eval(
    workspace: Any, way: str, reentrant: bool, dtype: str, media: bool
) -> None:
    import torch

    model = workspace.load().to(getattr(torch, dtype))
    batch = workspace.inputs(text_only=not media or way == "chunks")
    options = {**OPTIONS, **WAYS[way]}
    torch.manual_seed(3)
    expected = model.eval().generate(**batch, **options, **KEPT)
    trained(model, reentrant)
    torch.manual_seed(3)
    assert_same(model.generate(**batch, **options, **KEPT), expected)
    assert model.training


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_a_loop_of_ones_own(workspace: Any, mode: str) -> None:
    """Forwards without gradients return the cache, and read it."""
    import torch

    model, ids = workspace.load(), workspace.inputs(text_only=True)["input_ids"]
    name = cache_names.of(type(model).forward)

    def read() -> list[Any]:
        found, cache = [], None
        with getattr(torch, mode)():
            for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
                output = model(input_ids=part, use_cache=True, **{name: cache})
                cache = output[name]
                found.append(output.logits)
        assert cache.get_seq_length() == ids.shape[1]
        return found

    expected = read()
    trained(model)
    assert all(map(torch.equal, read(), expected))


@pytest.mark.parametrize("trains_too", [False, True])
def test_an_assistant(workspace: Any, trains_too: bool) -> None:
    model, assistant = workspace.load(), workspace.load_assistant()
    batch = workspace.inputs(text_only=True)
    expected = generate(model, batch, assistant_model=assistant)
    trained(model)
    if trains_too:
        trained(assistant)
    assert_same(generate(model, batch, assistant_model=assistant), expected)


def test_a_model_prepared_by_peft(workspace: Any) -> None:
    """In 4 bits a CPU computes otherwise in training mode, so that is compared without checkpointing."""
    from peft import PeftModel, prepare_model_for_kbit_training

    model = prepare_model_for_kbit_training(
        workspace.load("4bit"), gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model = PeftModel.from_pretrained(model, workspace.adapter("all"), is_trainable=True).train()
    batch = workspace.inputs(text_only=True)
    assert model.get_base_model().is_gradient_checkpointing
    found = generate(model, batch)
    model.get_base_model().gradient_checkpointing_disable()
    assert_same(found, generate(model, batch))


@pytest.mark.parametrize("reentrant", [False, True])
def test_training_is_checkpointed_as_before(workspace: Any, reentrant: bool) -> None:
    """Between two rollouts, each layer is recomputed in the backward pass, and the gradients are unchanged."""
    import torch

    model, batch = workspace.load(), workspace.inputs(text_only=True)
    loss, expected = gradients(model.train(), batch)
    trained(model, reentrant)
    generate(model, batch)
    counted = calls(model)
    found = gradients(model, batch)
    assert counted == [2] * len(counted)
    generate(model, batch)
    assert counted == [2 + 5] * len(counted)
    assert torch.equal(found[0], loss)
    assert found[1].keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[1][name], gradient), name
    with without(PATCH.id) if is_affected(PATCH) else contextlib.nullcontext():
        again = gradients(model, batch)
    assert all(torch.equal(again[1][name], found[1][name]) for name in expected)


def test_with_gradients_the_cache_is_dropped_with_upstreams_warning(
    workspace: Any, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers

    model, batch = trained(workspace.load()), workspace.inputs(text_only=True)
    logger = transformers.utils.logging.get_logger("transformers")
    transformers.utils.logging.get_logger("transformers.utils.generic").warning_once.__func__.cache_clear()
    logger.addHandler(caplog.handler)
    try:
        output = model(**batch, use_cache=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert cache_names.cache_in(output) is None
    assert "`use_cache=True` is incompatible with gradient checkpointing" in caplog.text


def test_what_was_set_stays_set(workspace: Any) -> None:
    """PEFT and TRL ask for it, also without gradients."""
    import torch

    model = workspace.load()
    assert not model.is_gradient_checkpointing
    trained(model)
    layer = model.get_decoder().layers[0]
    with torch.no_grad():
        assert model.is_gradient_checkpointing
        assert vars(layer)[checkpointing.FLAG] is True
        assert not checkpointing.drops_cache(layer)
    assert layer.gradient_checkpointing is True
    assert not hasattr(model, checkpointing.FLAG)
    assert type(layer).gradient_checkpointing is False
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.gradient_checkpointing is True
    with torch.no_grad():  # what is turned off without gradients is off
        model.gradient_checkpointing_disable()
    assert layer.gradient_checkpointing is False
    assert not model.is_gradient_checkpointing


@AFFECTED
def test_undone_it_is_upstream_for_models_of_before_and_of_meanwhile(workspace: Any) -> None:
    import torch

    with without(PATCH.id):
        old = trained(workspace.load())
    new = trained(workspace.load())
    batch = workspace.inputs(text_only=True)
    expected = [generate(model, batch) for model in (old, new)]
    assert_same(*expected)
    with without(PATCH.id):
        for model in (old, new):
            layer = model.get_decoder().layers[0]
            with torch.no_grad():
                assert layer.gradient_checkpointing is True
                assert checkpointing.drops_cache(layer)
            assert type(layer).gradient_checkpointing is False
            assert not torch.equal(generate(model, batch).logits[-1], expected[0].logits[-1])
            counted = calls(model)
            gradients(model, batch)
            assert counted == [2] * len(counted)
    for model in (old, new):
        assert_same(generate(model, batch), expected[0])


@AFFECTED
def test_undone_a_static_cache_raises_the_original_error(workspace: Any) -> None:
    model, batch = trained(workspace.load()), workspace.inputs(text_only=True)
    with without(PATCH.id), pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        generate(model, batch, **WAYS["static"])


@contextlib.contextmanager
def _fresh_compiler() -> Iterator[Any]:
    import torch

    torch.compiler.reset()
    try:
        yield torch._dynamo.utils.counters
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_model(workspace: Any, grad: bool) -> None:
    """Without gradients there is nothing of checkpointing in the graph, so it is one."""
    import torch

    model, ids = workspace.load(), workspace.inputs(text_only=True)["input_ids"]
    trained(model)
    decoder = model.get_decoder()
    compiled = torch.compile(decoder, backend="eager")
    with _fresh_compiler() as counters, torch.set_grad_enabled(grad):
        expected = decoder(input_ids=ids, use_cache=False).last_hidden_state
        counters.clear()
        found = compiled(input_ids=ids, use_cache=False).last_hidden_state
        breaks = sum(counters["graph_break"].values())
    assert torch.equal(found, expected)
    assert found.requires_grad is grad
    assert grad or breaks == 0


def test_a_thread_that_trains_and_one_that_generates(workspace: Any) -> None:
    """Whether gradients are recorded is each thread's own."""
    import torch

    model, batch = trained(workspace.load()), workspace.inputs(text_only=True)
    expected, (_, right) = generate(model, batch), gradients(model, batch)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(generate(model, batch) for _ in range(3)))
    thread.start()
    counted = calls(model)
    trained_meanwhile = [gradients(model, batch)[1] for _ in range(3)]
    thread.join()
    assert min(counted) >= 6
    for one in found:
        assert_same(one, expected)
    assert len(found) == 3
    assert all(torch.equal(one[name], right[name]) for one in trained_meanwhile for name in right)


OTHERS = {
    "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "Qwen3": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    "Gemma3": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("way", ["default", "static", "beams"])
def test_other_models(name: str, way: str) -> None:
    import torch
    import transformers

    text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(
        **OTHERS[name], vocab_size=64, num_key_value_heads=2, head_dim=8, pad_token_id=0
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    batch = {"input_ids": torch.arange(3, 12)[None], "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    expected = generate(model, batch, **WAYS[way])
    _, right = gradients(model.train(), batch)
    trained(model)
    assert_same(generate(model, batch, **WAYS[way]), expected)
    counted = calls(model)
    _, found = gradients(model, batch)
    assert counted == [2] * len(counted)
    assert all(torch.equal(found[one], right[one]) for one in right)


_LATE = """
import sys, tempfile, torch
import transformers.models.gemma4.modeling_gemma4
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)
model = LlamaForCausalLM(config)
ids, options = torch.arange(3, 12)[None], dict(do_sample=False, max_new_tokens=4, output_logits=True)
def logits():
    found = model.generate(ids, **options, return_dict_in_generate=True, pad_token_id=0).logits
    return torch.stack(found)
right = logits()
model.train().gradient_checkpointing_enable({"use_reentrant": False})
import gemma4_compat
print(torch.equal(logits(), right))
gemma4_compat.revert()
print(torch.equal(logits(), right))
"""


@AFFECTED
def test_a_model_that_is_older_than_the_import() -> None:
    done = child("-c", _LATE)
    assert done.stdout.split() == ["True", "False"], done.stderr
