"""Decoding by custom kernels (``decode_fast``) on a GPU: an answer has the same bits wherever weights are,
whatever the length of the cache and the calls before, and whatever else is in the batch.

PyTorch's kernels read the prompt, and their bits depend on the batch and the cache. Tests that would see this give the
first row the keys and values that it has without the others (:func:`read_alike`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import gemma4_compat
from tests.conftest import is_affected, patch
from tests.patches.quantization.packed import kept
from tests.unit.generation.calls import (
    CHANGES,
    SCENARIOS,
    Models,
    Run,
    ask,
    assert_equal,
    base,
    differ,
    generate,
    static_cache,
    steps,
    text,
)
from tests.unit.generation.test_deferred_stop import answer, end_at, same
from tests.world.gpu.test_graph_decoding import CELLS, PLACEMENTS

#: Tokens that are compared: of the prompt, of a step that runs as it is, of a captured one, of fused ones.
NEW = 8
LENGTH = 24


@pytest.fixture(autouse=True)
def fused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a few tokens also have fused kernels."""
    from gemma4_compat._graphs import fused_steps

    monkeypatch.setattr(fused_steps.Progress, "after", 2)


@pytest.fixture(scope="module")
def models(workspace: Any) -> Models:
    return Models(workspace)


def agree(model: Any, run: Run, other: Any, other_run: Run) -> list[Any]:
    """The outputs of ``run``, which are those of the other model, both replayed."""
    before = steps(model).replayed, steps(other).replayed
    found, expected = run({}), other_run({})
    assert steps(model).replayed > before[0]
    assert steps(other).replayed > before[1]
    for one, another in zip(found, expected, strict=True):
        assert_equal(one, another)
    return found


@contextlib.contextmanager
def read_alike(model: Any, length: int = LENGTH) -> Iterator[None]:
    """Inside, the first row of a batch has the same keys, values and first token after its prompt, whatever else is in
    the batch and however long the cache is.
    """
    import torch

    kind = type(base(model))
    read = kind._prefill

    def prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = read(self, *args, **kwargs)
        cache = next(value for value in outputs.values() if hasattr(value, "layers"))
        generator = torch.Generator(model.device).manual_seed(0)
        for layer in cache.layers:
            for held in (layer.keys, layer.values):
                if held is not None:
                    valid = held[0, :, :length]
                    valid.copy_(torch.randn(valid.shape, generator=generator, device=held.device))
        outputs.logits[0].zero_()
        outputs.logits[0, -1, 5] = 1
        return outputs

    with mock.patch.object(kind, "_prefill", prefill):
        yield


def first_row(model: Any, batch: int = 1, **options: Any) -> Any:
    """The tokens after the prompt and the logits of the first row, from the second token on."""
    import torch

    found = generate(model, text(model, LENGTH, batch=batch), new=NEW, **options)
    return torch.stack([logits[0] for logits in found.logits[1:]]), found.sequences[0, LENGTH:]


def assert_same(one: Any, other: Any) -> None:
    import torch

    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("quantization", "adapter", "where"), [cell for cell in CELLS if cell[2] != "device"])
def test_the_same_bits_wherever_weights_lie(
    models: Models, quantization: str | None, adapter: str | None, where: str, scenario: str
) -> None:
    model = models(quantization, adapter, where, own=True)
    whole = models(quantization, adapter, own=True)
    agree(model, SCENARIOS[scenario](model, models), whole, SCENARIOS[scenario](whole, models))


@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_the_same_bits_however_long_the_cache_is(
    models: Models, quantization: str | None, adapter: str | None, where: str
) -> None:
    model = models(quantization, adapter, where, own=True)
    with read_alike(model):
        expected = first_row(model, past_key_values=static_cache(model, LENGTH + NEW))
        for length in (64, 300, 5000):
            assert_same(first_row(model, past_key_values=static_cache(model, length)), expected)


@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_the_same_bits_whatever_else_is_in_the_batch(
    models: Models, quantization: str | None, adapter: str | None, where: str
) -> None:
    model = models(quantization, adapter, where, own=True)
    with read_alike(model):
        expected = first_row(model)
        for batch in (2, 3, 9, 33):
            assert_same(first_row(model, batch), expected)


@pytest.mark.parametrize("where", PLACEMENTS)
def test_the_same_bits_whatever_was_asked_before(models: Models, where: str) -> None:
    model = models.fresh(adapter="language", where=where, own=True)
    run = ask(model, new=NEW)
    (first,) = run({})  # its steps run as they are, are captured, and are fused
    (again,) = run({})
    assert_equal(first, again)
    for batch, length in ((3, 5), (1, 200), (2, 12)):
        generate(model, text(model, length, batch=batch), new=NEW)
    with model.disable_adapter():
        generate(model, text(model), new=NEW)
    other = models.fresh(adapter="language", where=where, own=True)
    past = static_cache(model, LENGTH + NEW), static_cache(other, LENGTH + NEW)
    agree(model, ask(model, new=NEW, past_key_values=past[0]), other, ask(other, new=NEW, past_key_values=past[1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1, 512, 256), (2, 8, 1024, 256), (3, 2, 5000, 72), (1, 3, 33, 7)])
def test_rows_of_full_sliding_caches_are_moved(shape: tuple[int, ...], dtype: str) -> None:
    """By one kernel, in place: as it is, and in a graph, where kernels may start early."""
    import torch

    from gemma4_compat._kernels import kernels
    from gemma4_compat._kernels.match import custom
    from gemma4_compat._kernels.specs import shifting

    device, kind = torch.device("cuda", 0), getattr(torch, dtype)
    if kernels.COMPILERS["cuda"].unsupported_reason() is not None:
        pytest.skip("no compiler")
    batch, heads, _, width = shape
    held = [torch.randn(shape, device=device, dtype=kind) for _ in range(2)]
    fresh = [torch.randn((batch, 1, heads, width), device=device, dtype=kind).transpose(1, 2) for _ in range(2)]
    assert shifting.kernel_of(*held, *fresh) is not None
    expected, others = [one.clone() for one in held], [one.clone() for one in fresh]

    def shift() -> None:
        for new in fresh:  # a kernel before
            new.add_(1)
        custom.operator("shift")(*held, *fresh, True)

    graph, run = torch.cuda.CUDAGraph(), shift
    for _ in range(9):
        run()
        for new in others:
            new.add_(1)
        shifting.copied(*expected, *others)
        assert all(torch.equal(*pair) for pair in zip(held, expected, strict=True))
        if run is shift:
            with torch.cuda.graph(graph):
                shift()
            run = graph.replay


@pytest.mark.parametrize("where", PLACEMENTS)
def test_a_window_that_becomes_full(models: Models, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Between two tokens, in beams and in batches: the bits are those of PyTorch's copies."""
    from gemma4_compat._kernels.specs import shifting

    def runs(model: Any) -> list[Any]:
        return [
            generate(model, text(model, 3, batch=batch), new=20, **options)
            for batch, options in ((1, {}), (3, {}), (1, {"num_beams": 3}))
        ]

    found = runs(models.fresh(where=where, own=True))
    monkeypatch.setattr(shifting, "kernel_of", lambda *_: None)
    for one, other in zip(found, runs(models.fresh(where=where, own=True)), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_adapters_that_are_switched(models: Models, quantization: str | None) -> None:
    model = models.fresh(quantization, "language", own=True)
    model.load_adapter(models.workspace.adapter("all"), "second")
    run = ask(model, new=NEW)
    first = run({})
    model.set_adapter("second")
    second = run({})
    assert differ(first, second)
    with model.disable_adapter():
        plain = run({})
    assert differ(plain, first)
    model.set_adapter("default")
    assert not differ(run({}), first)
    bare = models.fresh(quantization, own=True)
    for one, other in zip(plain, ask(bare, new=NEW)({}), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed_before_a_replay(models: Models, what: str, quantization: str | None) -> None:
    model, other = models.fresh(quantization, own=True), models.fresh(quantization, own=True)
    before = ask(model)({})
    for one in (model, other):
        CHANGES[what](one)
    assert differ(before, agree(model, ask(model), other, ask(other)))


@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_kernels_are_fused(models: Models, quantization: str | None, adapter: str | None, where: str) -> None:
    from gemma4_compat._graphs import fused_steps

    model = models.fresh(quantization, adapter, where, own=True)
    reason = fused_steps.unsupported_reason(model.device)
    if reason is not None:
        pytest.skip(reason)
    ask(model, new=NEW)({})
    assert (steps(model).fused, steps(model).not_fused, steps(model).reasons) == (1, (), ())


def test_without_it_the_bits_are_pytorchs(models: Models) -> None:
    model = models.fresh(own=True)
    gemma4_compat.decode_fast(model, enabled=False)
    for one, other in zip(ask(model, new=NEW)({}), ask(model, new=NEW)({"disable_compile": True}), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 50}])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_stops_that_are_read_late(
    models: Models, monkeypatch: pytest.MonkeyPatch, where: str, sampled: dict[str, Any]
) -> None:
    """The same tokens and the same random numbers after them as where the host waits for each."""
    from gemma4_compat._graphs import deferred_stop

    if not is_affected(patch("transformers-deferred-stop")):
        pytest.skip("transformers before 5.17 has no deferred stop check")
    model = models(where=where, own=True)
    for batch in (1, 3):
        for end in (-1, end_at(model, 9, batch=batch, **sampled)):
            options = {"batch": batch, "eos_token_id": end, "pad_token_id": 0, **sampled}
            found = []
            for cost in (float("inf"), 0.0):
                monkeypatch.setattr(deferred_stop, "WAITING", cost)
                found.append(answer(model, **options))
            assert same(*found)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(256, 1536), (1536, 256), (1536, 12288), (10240, 2560), (15360, 3840), (3840, 15360)]
)
def test_a_product_errs_less_than_bitsandbytes(outputs: int, inputs: int, dtype: str) -> None:
    import torch

    from benchmarks.decoding.own_kernels import wrong
    from benchmarks.decoding.own_products import Products

    found = Products(torch.device("cuda", torch.cuda.current_device())).errors(getattr(torch, dtype), outputs, inputs)
    assert wrong([found]) == [], found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("group", [32, 64, 128, 3840])
def test_packed_integers_are_unpacked_with_pytorchs_bits(group: int, dtype: str) -> None:
    import torch

    from gemma4_compat._gemma4.quantization import packed_linear
    from gemma4_compat._kernels.match import dequantizing
    from tests.unit.kernels.test_packed_integers import packed

    layer = packed(2816, 3840, group=group, dtype=getattr(torch, dtype), device="cuda:0")
    expected = packed_linear.unpacked(**layer)
    dequantizing.unpacked(**layer)  # may try the kernel
    with mock.patch.object(packed_linear, "unpacked", None):
        assert torch.equal(dequantizing.unpacked(**layer), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group", [32, 64, 128, 0])
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 1536), (1536, 12288), (15360, 3840), (3840, 15360)])
def test_a_product_with_packed_integers_errs_less_than_with_what_is_unpacked(
    outputs: int, inputs: int, group: int, dtype: str
) -> None:
    import torch

    from gemma4_compat._gemma4.quantization import packed_linear
    from gemma4_compat._kernels.match import custom
    from tests.unit.kernels.test_packed_integers import packed

    layer = packed(outputs, inputs, group=group or inputs, dtype=getattr(torch, dtype), device="cuda:0")
    values, scale = packed_linear.unpacked(**layer), layer["scale"]
    wide = packed_linear.unpacked(**layer | {"scale": scale.double(), "stored": torch.float64})
    for rows in (1, 8, 9, 64):
        given = torch.randn((rows, inputs), device="cuda:0").to(scale.dtype)
        with torch.no_grad(), custom.CustomKernels(given.device, rows):
            found = packed_linear.product(given, layer["packed"], scale, None)
            alone = packed_linear.product(given[-1:].contiguous(), layer["packed"], scale, None)
            other = torch.nn.functional.linear(given, values)
        assert torch.equal(found[-1:], alone)
        right = given.double() @ wide.t()
        errors, others = ((one.double() - right).abs() for one in (found, other))
        assert errors.mean() <= others.mean(), rows
        assert errors.max() <= 1.01 * others.max(), rows


def test_packed_layers_have_the_same_bits_however_long_the_cache_is(workspace: Any) -> None:
    model = gemma4_compat.decode_fast(kept(workspace).to(workspace.main))
    model.generation_config.cache_implementation = None  # each call says
    with read_alike(model):
        expected = first_row(model, past_key_values=static_cache(model, LENGTH + NEW))
        for length in (64, 300, 5000):
            assert_same(first_row(model, past_key_values=static_cache(model, length)), expected)
    assert steps(model).fused
    assert (steps(model).not_fused, steps(model).reasons) == ((), ())


@pytest.mark.parametrize("columns", [256, 1536, 2560, 3840, 5376])
@pytest.mark.parametrize(("batch", "tokens"), [(4, 1), (8, 1), (1, 8), (2, 3), (17, 1), (64, 1)])
def test_means_of_norms_do_not_depend_on_the_number_of_rows(batch: int, tokens: int, columns: int) -> None:
    import torch

    from gemma4_compat._kernels.match import custom

    given = torch.randn((batch, tokens, columns), device="cuda:0")
    with custom.CustomKernels(given.device, tokens):
        found = given.mean(-1, keepdim=True)
    rows = given.flatten(0, 1)
    assert torch.equal(found.flatten(), torch.stack([row[None].mean(-1, keepdim=True) for row in rows]).flatten())
