"""F70: gradients are finite where cuDNN computes attention, and no output or gradient changes elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import dormant
from gemma4_compat._gemma4.attention import unseen_keys
from gemma4_compat._lab import tiny, tiny_configs, tiny_models
from gemma4_compat._lab.stand_ins import cudnn, flash
from gemma4_compat.patches.training.transformers_cudnn_padding import PATCH
from tests.patches.promise import Promise

VARIANTS = ["E2B", "E4B", "12B", "26B-A4B", "31B"]
LENGTH, LOST = 24, 14  # padded tokens of the first row: more than the sliding window, 8


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"gradients of [1-9]\d* of \d+ weights are NaN"
    exact = False


@pytest.fixture
def cudnn_takes_it(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The CPU is one of the devices on which PyTorch takes cuDNN. The devices that were asked about."""
    asked: list[str] = []

    def takes(device: Any) -> bool:
        asked.append(str(device))
        return True

    monkeypatch.setattr(unseen_keys, "takes_cudnn", takes)
    dormant.activate(unseen_keys.ID)  # a torch without CUDA has no need of it
    return asked


Load = Callable[..., Any]


@pytest.fixture
def load(variant_checkpoint: Callable[[str], Path]) -> Load:
    """``load(variant, **options)``: a model in bf16 on the CPU, in eval mode. Nothing is dropped in either mode."""
    return lambda variant="E2B", **options: tiny.load(variant_checkpoint(variant), **options)


def batch(side: str = "left") -> dict[str, Any]:
    """Two rows of text, the first of them padded."""
    import torch

    ids = torch.randint(3, 240, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, slice(LOST) if side == "left" else slice(-LOST, None)] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


Found = tuple[Any, dict[str, Any]]


def step(model: Any, inputs: dict[str, Any]) -> Found:
    """The logits, and every gradient of the loss."""
    found = model(**inputs)
    found.loss.backward()
    return found.logits.detach(), gradients(model)


def gradients(model: Any) -> dict[str, Any]:
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def without(compute: Callable[[], Any]) -> Any:
    gemma4_compat.revert(PATCH.id)
    try:
        return compute()
    finally:
        gemma4_compat.install()


def same(compute: Callable[[], Found], asked: list[str]) -> None:
    """Every logit, those of padded positions included, and every gradient are what they are without the patch."""
    import torch

    logits, found = compute()
    assert asked
    plain, expected = without(compute)
    assert torch.equal(logits, plain)
    assert found.keys() == expected.keys()
    assert any(gradient.any() for gradient in found.values())
    assert not [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])]
    with cudnn.kernel("cpu"):
        _, broken = without(compute)
        _, repaired = compute()
    assert any(gradient.isnan().any() for gradient in broken.values()), "no query without a key"
    assert not [name for name, gradient in repaired.items() if not torch.equal(gradient, expected[name])]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_else_changes(load: Load, cudnn_takes_it: list[str], variant: str, side: str) -> None:
    model = load(variant)
    same(lambda: step(model, batch(side)), cudnn_takes_it)


@pytest.mark.parametrize("variant, reentrant", [("E2B", False), ("31B", False), ("31B", True)])
def test_checkpointing(load: Load, cudnn_takes_it: list[str], variant: str, reentrant: bool) -> None:
    model = load(variant).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    same(lambda: step(model, batch()), cudnn_takes_it)


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_image(load: Load, cudnn_takes_it: list[str], variant: str) -> None:
    """Padded on the left; its tokens attend to each other in the 12B, the 26B-A4B and the 31B."""
    import torch

    model, inputs = load(variant), tiny.inputs(variant=variant)
    for name in ("input_ids", "attention_mask"):
        inputs[name] = torch.nn.functional.pad(inputs[name], (LOST, 0))
    for name in ("pixel_values", "input_features"):
        if name in inputs:
            inputs[name] = inputs[name].to(model.dtype)
    ids = inputs["input_ids"]
    inputs["mm_token_type_ids"] = (ids == tiny_configs.IMAGE_TOKEN).long() + 3 * (ids == tiny_configs.AUDIO_TOKEN)
    inputs["labels"] = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    same(lambda: step(model, inputs), cudnn_takes_it)


@pytest.mark.parametrize("variant", ["E2B", "26B-A4B"])
def test_a_cache_with_gradients(load: Load, cudnn_takes_it: list[str], variant: str) -> None:
    """The second half of the tokens reads the keys of the first half; gradients reach both."""
    import torch
    from transformers import DynamicCache

    model, inputs = load(variant), batch()
    half = LENGTH // 2

    def both() -> Found:
        cache = DynamicCache(config=model.config.get_text_config())
        parts, mask = [], inputs["attention_mask"]
        for at in (0, half):
            seen = {"attention_mask": mask[:, : at + half], "past_key_values": cache}
            parts.append(model(input_ids=inputs["input_ids"][:, at : at + half], **seen).logits)
        logits = torch.cat(parts, dim=1)
        labels = inputs["labels"][:, 1:].flatten()
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels).backward()
        return logits.detach(), gradients(model)

    same(both, cudnn_takes_it)


def text_only(model: Any) -> Any:
    """A language model by itself: before 5.6 the loss of the whole model reads a mask as one of two dimensions."""
    import torch
    from transformers import Gemma4ForCausalLM

    torch.manual_seed(2)
    return Gemma4ForCausalLM(model.config.get_text_config()).to(model.dtype).eval()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("passed", ["tensor", "mapping"])
def test_masks_of_the_users_own(load: Load, cudnn_takes_it: list[str], kind: str, passed: str) -> None:
    import torch

    model, inputs = text_only(load()), batch()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None]
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, -torch.inf)
    kept = mask.clone()
    kinds = {"full_attention": mask, "sliding_attention": mask}
    inputs["attention_mask"] = mask if passed == "tensor" else kinds
    same(lambda: step(model, inputs), cudnn_takes_it)
    assert torch.equal(mask, kept)


def given_masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that PyTorch's attention gets from now on."""
    import torch

    given, plain = [], torch.nn.functional.scaled_dot_product_attention

    def attention(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        given.append(attn_mask)
        return plain(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    return given


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_large_mask_is_copied_only_for_queries_without_a_key(
    load: Load, cudnn_takes_it: list[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import torch

    monkeypatch.setattr(unseen_keys, "_LARGE", LENGTH * LENGTH)
    model, inputs = text_only(load()), batch()
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    unseen = slice(4, 6)
    if kind == "float":
        mask = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, -torch.inf)
    inputs["attention_mask"] = mask
    with monkeypatch.context() as patched:
        given = given_masks(patched)
        model(**inputs).loss.backward()
        assert given
        assert {one.data_ptr() for one in given} == {mask.data_ptr()}
        mask[0, :, unseen] = False if kind == "bool" else -torch.inf  # as a collator may that keeps its mask
        given.clear()
        model(**inputs).loss.backward()
        assert given
        assert mask.data_ptr() not in {one.data_ptr() for one in given}
    model.zero_grad(set_to_none=True)
    same(lambda: step(model, inputs), cudnn_takes_it)


def test_packed_sequences_with_padding(load: Load, cudnn_takes_it: list[str]) -> None:
    import torch

    model, inputs = load(), batch()
    inputs["position_ids"] = torch.cat([torch.arange(18), torch.arange(LENGTH - 18)]).expand(2, -1)
    same(lambda: step(model, inputs), cudnn_takes_it)


def test_without_gradients_or_masks_nothing_is_asked(load: Load, cudnn_takes_it: list[str]) -> None:
    import torch

    model, inputs = load(), batch()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        model(**inputs)
        model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)
    model(input_ids=ids[:, :7], attention_mask=torch.ones_like(ids[:, :7]))
    model.requires_grad_(False)
    model(**inputs)
    assert cudnn_takes_it == []


def test_without_gradients_the_function_is_upstreams(load: Load, cudnn_takes_it: list[str]) -> None:
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    load()

    def sdpa() -> Any:
        """Beneath the function that computes long texts by windows."""
        found = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        return found.args[0] if isinstance(found, functools.partial) else found

    with torch.no_grad():
        assert sdpa() is sdpa_attention_forward
    assert sdpa() is unseen_keys.attention


def test_other_kinds_of_attention_are_left_alone(load: Load, cudnn_takes_it: list[str]) -> None:
    model = load(attn_implementation={"text_config": "eager"})
    model(**batch()).loss.backward()
    assert cudnn_takes_it == []


def test_other_models_are_left_alone(load: Load, cudnn_takes_it: list[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**shape, vocab_size=256))(**batch()).loss.backward()
    assert cudnn_takes_it == []


def test_layers_that_run_sdpa_beside_flash(load: Load, cudnn_takes_it: list[str], tmp_path: Any) -> None:
    """All layers of a prompt with an image, in a model whose image tokens attend to each other."""
    import torch

    variant = "31B"
    folder = tiny_models.build_checkpoint(tmp_path, variant=variant, full_width=512)
    with flash.kernel() as (name, dtype):
        model = tiny.load(folder, dtype=dtype, attn_implementation={"text_config": name})
        inputs = tiny.inputs(variant=variant, text_only=True)
        for each in ("input_ids", "attention_mask"):
            inputs[each] = torch.nn.functional.pad(inputs[each], (LOST, 0))
        inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        inputs["mm_token_type_ids"][:, -4:] = 1
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert cudnn_takes_it


def graphs(model: Any, inputs: dict[str, Any]) -> int:
    import torch

    found = []

    def backend(graph: Any, _inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch.compiler.reset()
    try:
        torch.compile(model, backend=backend)(**inputs).loss.backward()
    finally:
        torch.compiler.reset()
    return len(found)


def test_it_breaks_no_graph(load: Load, cudnn_takes_it: list[str]) -> None:
    model, inputs = load(), batch()
    found = graphs(model, inputs)
    assert found == without(lambda: graphs(model, inputs))


def test_what_is_asked_of_a_gpu_is_traced(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper's properties are lent: there is none here."""
    import torch
    from torch._dynamo.variables import torch as tracing

    def properties(device: Any) -> Any:
        return type("Properties", (), {"major": 9 - (device.index or 0), "minor": 0})

    # The first trace of a process notes torch's functions by what they are then: it is not to find the lent one.
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
    known = tracing.constant_fold_functions
    assert torch.cuda.get_device_properties in known  # so that a graph has its answer as a constant
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    for number, taken in ((0, True), (1, False)):
        device = torch.device("cuda", number)
        assert unseen_keys.takes_cudnn(device) is taken
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not unseen_keys.takes_cudnn(torch.device("cuda", 0))
    assert not unseen_keys.takes_cudnn(torch.device("cpu"))
    found = torch.compile(
        lambda x, device: x + 1 if unseen_keys.takes_cudnn(device) else x, backend="eager", fullgraph=True
    )
    assert found(torch.zeros(1), torch.device("cuda", 0)).item() == 1.0
    torch.compiler.reset()
