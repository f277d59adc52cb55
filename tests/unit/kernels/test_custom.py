"""Custom kernels: near PyTorch's, and the same bits wherever weights lie and whatever happened before."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import gemma4_compat
from gemma4_compat._graphs import decoder, fused_steps
from gemma4_compat._graphs.captured_calls import CapturedCalls
from gemma4_compat._kernels.match import custom
from tests.unit.generation import calls
from tests.unit.generation.calls import Models
from tests.unit.kernels.host_kernels import HostCompiler

NEAR = 0.25  # of the logits' standard deviation: tiny models in bf16


def own_model(models: Models, quantization: str | None, adapter: str | None, where: str) -> Any:
    """A model of the test's own."""
    model = gemma4_compat.decode_fast(models.fresh(quantization, adapter, where))
    assert decoder.of(calls.base(model)).custom
    return model


def asked(model: Any, new: int = 8, **options: Any) -> Any:
    return calls.generate(model, calls.text(model, **options), new=new)


@pytest.mark.parametrize(("quantization", "adapter"), [("4bit-double", "language"), (None, None)])
def test_bits_are_those_of_every_placement_and_way(
    kernels_on_host: None,
    models: Models,
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
    adapter: str | None,
) -> None:
    found = []
    for where, after in (("device", 10**6), ("device", 2), ("streamed", 2)):
        monkeypatch.setattr(fused_steps.Progress, "after", after)
        model = own_model(models, quantization, adapter, where)
        found.append(asked(model))
        counted = calls.steps(model)
        assert (counted.eager, counted.fused, counted.not_fused) == (1, int(after == 2), ()), counted
    for other in found[1:]:
        calls.assert_equal(found[0], other)
    model = gemma4_compat.decode_fast(model, exact=True)
    exact = asked(model)
    assert torch.equal(found[0].logits[0], exact.logits[0])  # of the prompt, which PyTorch reads
    difference = (found[0].logits[1] - exact.logits[1]).abs().max()
    assert 0 < difference < NEAR * exact.logits[1].std(), difference


def test_a_step_without_a_graph_has_the_same_bits(
    kernels_on_host: None, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own_model(models, "4bit-double", None, "device")
    expected = asked(model)
    model = own_model(models, "4bit-double", None, "device")
    monkeypatch.setattr(CapturedCalls, "_captured", lambda *_: None)
    calls.assert_equal(expected, asked(model))
    assert calls.steps(model).captured == 0


def test_bits_do_not_depend_on_the_cache_or_the_calls_before(kernels_on_host: None, models: Models) -> None:
    model = own_model(models, "4bit-double", None, "device")
    asked(model, new=12, length=40, seed=3)  # on some CPUs bitsandbytes then packs weights, and has other bits
    expected = asked(model)
    asked(model, new=12, length=40, seed=3)
    calls.assert_equal(expected, asked(model))
    text = calls.text(model)
    for length in (36, 150):
        found = calls.generate(model, text, new=8, past_key_values=calls.static_cache(model, length))
        calls.assert_equal(expected, found)


def test_a_sequence_does_not_depend_on_its_batch(kernels_on_host: None, models: Models) -> None:
    """Steps do not; the prompt is read by PyTorch, whose bits depend on the number of rows. So one row is repeated."""
    model = own_model(models, None, "language", "device")
    text = calls.text(model)
    twice = {name: tensor.repeat(2, 1) for name, tensor in text.items()}
    found = calls.generate(model, twice, new=6)
    assert torch.equal(found.sequences[0], found.sequences[1])
    assert all(torch.equal(*logits) for logits in found.logits)
    assert calls.steps(model).replayed


def test_undoing_it_brings_pytorchs_bits_back(kernels_on_host: None, models: Models) -> None:
    model = own_model(models, None, None, "device")
    asked(model)
    gemma4_compat.decode_fast(model, exact=True)
    calls.compared(model, calls.ask(model))
    gemma4_compat.decode_fast(model)
    gemma4_compat.decode_fast(model, enabled=False)
    assert not decoder.of(calls.base(model)).custom
    expected = calls.generate(model, calls.text(model), {"disable_compile": True})
    calls.assert_equal(expected, calls.generate(model, calls.text(model)))


def test_without_kernels_pytorch_computes_and_one_line_says_so(tapes: Any, models: Models) -> None:
    model = own_model(models, None, None, "device")
    calls.compared(model, calls.ask(model))
    assert calls.steps(model).not_fused == ("there are no kernels for cpu",)


def test_kernels_that_cannot_be_compiled_are_left_to_pytorch(
    kernels_on_host: None, models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("NVRTC_ERROR_COMPILATION\nno such architecture")

    monkeypatch.setattr(HostCompiler, "compiled", fails)
    monkeypatch.setattr(custom, "_broken", {})
    model = own_model(models, "4bit-double", None, "device")
    calls.compared(model, calls.ask(model))
    said = [record.message for record in caplog.records if "with PyTorch's bits" in record.message]
    reason = "this package's kernels failed: NVRTC_ERROR_COMPILATION no such architecture"
    assert said == [f"gemma4_compat: decoding with PyTorch's bits: {reason}"]
    assert calls.steps(model).not_fused == (reason,)


def test_operators_are_what_they_stand_for(kernels_on_host: None) -> None:
    """Repeated heads, packed heads and a plain call; weights of every kind; whatever does not suit is PyTorch's."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(shape, generator=generator).to(dtype)

    query, key, value = drawn(1, 4, 1, 64), drawn(1, 2, 40, 64), drawn(1, 2, 40, 64)
    mask = (torch.arange(40) < 33)[None, None, None]
    repeated = [heads[:, :, None].expand(1, 2, 2, 40, 64) for heads in (key, value)]
    linear, attention = torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention
    expected = attention(query.double(), *(heads.reshape(1, 4, 40, 64).double() for heads in repeated), attn_mask=mask)
    with torch.no_grad(), custom.CustomKernels(torch.device("cpu")):
        copied = [heads.reshape(1, 4, 40, 64) for heads in repeated]
        found = attention(query, copied[0], copied[1].contiguous(), attn_mask=mask)
        grouped = attention(query, key, value, attn_mask=mask, enable_gqa=True)
        # Any other operation gets the numbers, also from a list or through a property.
        others = [copied[0] + 0, torch.cat([copied[0], copied[0]]), copied[0].mT, copied[0][:, 1:]]
        assert copied[0].shape == (1, 4, 40, 64)
    whole = repeated[0].reshape(1, 4, 40, 64)
    for one, other in zip(others, (whole, torch.cat([whole, whole]), whole.mT, whole[:, 1:]), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(found, grouped)
    assert (found.double() - expected).abs().max() < 0.01
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for inputs, outputs in ((4, 48), (32, 48), (320, 40), (2048, 700)):
            for bias in (None, drawn(outputs, dtype=dtype)):
                given, weight = drawn(3, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype)
                unaligned = drawn(outputs * inputs + 1, dtype=dtype)[1:].view(outputs, inputs).copy_(weight)
                expected = linear(given.double(), weight.double(), None if bias is None else bias.double())
                with torch.no_grad(), custom.CustomKernels(torch.device("cpu")):
                    found = linear(given, weight, bias)
                    assert torch.equal(found[1:2], linear(given[1:2].contiguous(), weight, bias))
                    assert torch.equal(found, linear(given, unaligned, bias))
                error, pytorchs = (
                    (one.double() - expected).abs().max() for one in (found, linear(given, weight, bias))
                )
                assert error <= pytorchs * 1.5 + 2**-23 * expected.abs().max()
    for outputs, count in ((40, 9), (700, 9), (40, 32), (700, 17)):
        given, weight = drawn(count, 320), drawn(outputs, 320)
        with torch.no_grad(), custom.CustomKernels(torch.device("cpu")):
            found = linear(given, weight)
            for row in {0, 4, 8, count - 1}:
                assert torch.equal(found[row : row + 1], linear(given[row : row + 1], weight)), (outputs, count)
    many = drawn(65, 320), drawn(40, 320)
    expected = linear(*many)
    with torch.no_grad(), custom.CustomKernels(torch.device("cpu")):
        assert torch.equal(linear(*many), expected)  # PyTorch's: more rows than kernels have
