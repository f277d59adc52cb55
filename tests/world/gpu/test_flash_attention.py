"""Flash attention with a package's kernel on a GPU (F54), and what attention of full-attention layers takes (F59).

The bound is the one of flash-attn's own tests: the error, against the same in float32, is at most twice that of the
plain attention in the same dtype, and three times that for gradients. Here the plain attention is sdpa. An error is
the largest one for a layer's attention, and the norm of all for a whole model, which makes single ones large.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._lab import tiny, tiny_configs, tiny_models

KERNELS = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "kernels-community/flash-attn2": "kernels",
}
#: Of a head in sliding layers: the smallest kernel's, and that of the released models.
WIDTHS = (32, 256)
LENGTHS = (17, 30, 9)  # of packed sequences: the window is 8 tokens
TIMES, GRADIENT_TIMES = 2, 3
#: Where both errors are nearly none, of the norm.
LEAST = 1e-3

Models = Callable[..., tuple[Any, Any, Any]]


@pytest.fixture(autouse=True)
def without_cudnn() -> Iterator[None]:
    """CuDNN's backward pass, which ``sdpa`` takes on a Hopper GPU, gives NaN for queries that see no key
    (docs/TRAINING.md): then there is nothing to compare with.
    """
    import torch

    kept = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(kept)


@pytest.fixture(params=KERNELS)
def implementation(request: pytest.FixtureRequest) -> str:
    import importlib.util

    package = KERNELS[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs the package {package}")
    return str(request.param)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The widths of heads that the kernel was called for."""
    from transformers import modeling_flash_attention_utils as upstream

    widths: list[int] = []
    imports = upstream._lazy_imports

    def counted(function: Any) -> Any:
        if not getattr(function, "__name__", "").startswith("flash_attn"):
            return function

        @functools.wraps(function)
        def call(query: Any, *args: Any, **kwargs: Any) -> Any:
            widths.append(query.shape[-1])
            return function(query, *args, **kwargs)

        return call

    monkeypatch.setattr(upstream, "_lazy_imports", lambda *a, **k: tuple(counted(each) for each in imports(*a, **k)))
    monkeypatch.setattr(upstream, "_loaded_implementation", None)
    yield widths
    upstream._loaded_implementation = None  # what was counted is not used any more


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``folders(width, variant, window)``: a checkpoint with heads of 512 in full attention, as released models."""

    @functools.cache
    def build(width: int, variant: str | None, window: int) -> Path:
        changed = {"head_dim": width, "sliding_window": window, "max_position_embeddings": 16384}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in changed.items():
                patch.setitem(tiny_configs.TEXT, name, value)
            try:
                return tiny_models.build_checkpoint(tmp_path_factory.mktemp("wide"), variant=variant, full_width=512)
            except Gemma4CompatError as error:
                pytest.skip(str(error))

    return build


@pytest.fixture
def models(folders: Callable[..., Path], implementation: str) -> Models:
    """``models(width)``: the same model in float32 with sdpa, in bf16 with sdpa, in bf16 with flash attention."""
    import torch

    def load(width: int, variant: str | None = None, window: int = 8) -> tuple[Any, Any, Any]:
        folder = folders(width, variant, window)
        try:
            flash = tiny.load(folder, device=0, attn_implementation={"text_config": implementation})
        except (ImportError, ValueError, OSError) as error:  # not for this torch, or not downloaded
            pytest.skip(f"{implementation} cannot be loaded here: {error}")
        return tiny.load(folder, device=0, dtype=torch.float32), tiny.load(folder, device=0), flash

    return load


def tokens(batch: int, length: int) -> Any:
    import torch

    return torch.randint(3, 240, (batch, length), generator=torch.Generator().manual_seed(1)).cuda()


def forward(model: Any, **options: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(**options).logits.float()


def close(exact: Any, plain: Any, flash: Any, *, times: float = TIMES) -> dict[str, float]:
    """The errors of both, as shares of the norm, once they are within the bound."""
    errors = [((each - exact).norm() / exact.norm()).item() for each in (plain, flash)]
    assert errors[1] <= times * errors[0] + LEAST, errors
    return {"sdpa": errors[0], "flash": errors[1]}


def sliding(model: Any) -> int:
    """How many of its layers are."""
    return int(model.config.get_text_config().layer_types.count("sliding_attention"))


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_answers_of_sdpa(
    models: Models,
    called: list[int],
    implementation: str,
    width: int,
    padding: str,
    record: Callable[[str, Any], None],
) -> None:
    import torch

    ids = tokens(3, 64)
    mask = torch.ones_like(ids)
    for row, lost in ((0, 20), (2, 33)) if padding != "none" else ():
        mask[row, : lost if padding == "left" else 0] = 0
        mask[row, 64 - lost if padding == "right" else 64 :] = 0
    found = []
    for model in models(width):
        called.clear()
        output = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        output.loss.backward()
        weights = [one.grad.float().flatten() for _, one in sorted(model.named_parameters()) if one.grad is not None]
        found.append((output.logits.detach().float()[mask.bool()], torch.cat(weights)))
    assert called == [width] * sliding(model)  # of the last one: full attention runs sdpa
    logits = close(*(each[0] for each in found))
    gradients = close(*(each[1] for each in found), times=GRADIENT_TIMES)
    name = f"{implementation}, heads of {width}, padding {padding}"
    record(name, {"logits": logits, "gradients": gradients})


@pytest.mark.parametrize("window", [None, 8, 512])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_attention_of_a_layer(
    models: Models, implementation: str, width: int, window: int | None, record: Callable[[str, Any], None]
) -> None:
    import torch
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    models(width)  # or it is skipped
    generator, length = torch.Generator(0).manual_seed(4), 1100
    shapes = [(2, length, heads, width) for heads in (8, 1, 1)]
    inputs = [torch.randn(shape, generator=generator, device=0).bfloat16() for shape in shapes]
    along = torch.randn(shapes[0], generator=generator, device=0).bfloat16()
    behind = torch.arange(length, device=0)[:, None] - torch.arange(length, device=0)
    seen = (behind >= 0) & (behind < (window or length))
    scale = width**-0.5

    def sdpa(*given: Any) -> Any:
        query, key, value = (each.transpose(1, 2) for each in given)
        key, value = (each.expand(-1, 8, -1, -1) for each in (key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, attn_mask=seen, scale=scale).transpose(1, 2)

    def flash(*given: Any) -> Any:
        options = {"is_causal": True, "softmax_scale": scale, "sliding_window": window}
        return _flash_attention_forward(*given, None, query_length=length, implementation=implementation, **options)

    found = []
    for attention, dtype in ((sdpa, torch.float32), (sdpa, torch.bfloat16), (flash, torch.bfloat16)):
        given = [each.clone().to(dtype).requires_grad_() for each in inputs]
        output = attention(*given)
        output.backward(along.to(dtype))
        found.append([each.detach().float() for each in (output, *(one.grad for one in given))])
    errors = {
        name: [(each[place] - found[0][place]).abs().max().item() for each in found[1:]]
        for place, name in enumerate(("output", "query", "key", "value"))
    }
    record(f"{implementation}, a layer, heads of {width}, window {window}: errors of sdpa, of flash", errors)
    for name, (plain, other) in errors.items():
        assert other <= (TIMES if name == "output" else GRADIENT_TIMES) * plain + 1e-5, (name, plain, other)


@pytest.mark.parametrize("by", ["positions", "lengths"])
@pytest.mark.parametrize("width", WIDTHS)
def test_packed_sequences_are_apart(models: Models, called: list[int], width: int, by: str) -> None:
    import torch

    exact, plain, flash = models(width)
    ids = tokens(1, sum(LENGTHS))
    alone = [
        torch.cat([forward(each, input_ids=part) for part in ids.split(LENGTHS, 1)], 1) for each in (exact, plain)
    ]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].cuda()
    packed: dict[str, Any] = {"position_ids": positions}
    if by == "lengths":
        starts = torch.tensor([0, *LENGTHS], device=0).cumsum(0).to(torch.int32)
        packed |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        packed |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    called.clear()
    close(*alone, forward(flash, input_ids=ids, use_cache=False, **packed))
    assert called == [width] * sliding(flash)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_cache_in_parts(models: Models, called: list[int], width: int, kind: str) -> None:
    import torch
    from transformers import DynamicCache, StaticCache

    ids = tokens(1, 24)
    whole, found = forward((every := models(width))[0], input_ids=ids, use_cache=False), []
    for model in every[1:]:
        config = model.config.get_text_config()
        cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=32)
        called.clear()
        parts = ids.split((5, 1, 1, 6, 9, 1, 1), 1)
        found.append(torch.cat([forward(model, input_ids=part, past_key_values=cache) for part in parts], 1))
    close(whole, *found)
    assert set(called) == {width}


@pytest.mark.parametrize("variant", ["E2B", "31B", "12B"])
def test_generate_with_padding(models: Models, called: list[int], variant: str) -> None:
    import torch

    exact, plain, flash = models(256, variant)
    ids = tokens(2, 21)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    called.clear()
    made = flash.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False, disable_compile=True)
    assert set(called) == {256}
    assert made.shape == (2, 33)
    # The tokens that it chose, as the others see them: rounding may make another one the best.
    every = torch.cat([mask, torch.ones_like(made[:, 21:])], 1)
    close(*(forward(each, input_ids=made, attention_mask=every)[every.bool()] for each in (exact, plain, flash)))


@pytest.mark.parametrize("variant", ["E2B", "12B", "26B-A4B", "31B"])
def test_an_image(models: Models, called: list[int], variant: str) -> None:
    import torch

    batch = tiny.inputs(0, variant=variant)
    found = []
    for model in models(256, variant):
        dtype = next(model.parameters()).dtype
        given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
        called.clear()
        found.append(forward(model, **given))
        with torch.no_grad():
            model.generate(**given, max_new_tokens=5, do_sample=False, disable_compile=True)
    close(*found)
    assert set(called) == {256}  # where tokens of an image attend to each other: while decoding


def test_the_window_is_that_of_sdpa(models: Models, called: list[int]) -> None:
    exact, plain, flash = models(256, None, 512)
    ids = tokens(1, 1500)
    close(*(forward(each, input_ids=ids, use_cache=False) for each in (exact, plain, flash)))
    assert called == [256] * sliding(flash)


def test_checkpointing(models: Models, called: list[int]) -> None:
    import torch

    ids, found = tokens(1, 64), []
    for checkpointing in (False, True):
        model = models(256)[2].train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        called.clear()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(torch.cat([one.grad.float().flatten() for one in model.parameters() if one.grad is not None]))
        assert len(called) >= sliding(model) * (1 + checkpointing)
    assert (found[0] - found[1]).norm() <= 0.05 * found[0].norm()  # its backward pass adds up in any order


def test_what_it_takes(models: Models, implementation: str, record: Callable[[str, Any], None]) -> None:
    import torch

    ids, measured = tokens(1, 8192), {}
    for name, model in zip(("sdpa", "flash"), models(256, None, 512)[1:], strict=True):
        torch.cuda.reset_peak_memory_stats()
        before, seconds = torch.cuda.memory_allocated(), []
        for _ in range(4):
            torch.cuda.synchronize()
            started = time.perf_counter()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            model.zero_grad(set_to_none=True)
        measured[name] = {"seconds": sorted(seconds[1:])[1], "peak": torch.cuda.max_memory_allocated() - before}
    record(f"{implementation}, forward and backward of 8192 tokens, window 512, 6 layers", measured)
    assert measured["flash"]["peak"] <= measured["sdpa"]["peak"]


def test_memory_of_full_attention_grows_with_the_length(
    folders: Callable[..., Path], record: Callable[[str, Any], None]
) -> None:
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    model = tiny.load(folders(32, None, 8), device=0)  # not all of it: masks of sliding layers grow with the square
    text = model.config.get_text_config()
    layer = model.get_decoder().layers[text.layer_types.index("full_attention")].self_attn
    peaks = {}
    for length in (4096, 16384):
        heads = (text.num_attention_heads, text.num_key_value_heads, text.num_key_value_heads)
        inputs = [torch.zeros((1, number, length, 512), dtype=torch.bfloat16, device=0) for number in heads]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            sdpa_attention_forward(layer, *inputs, None, scaling=1.0, is_causal=True)
        peaks[length] = torch.cuda.max_memory_allocated() - before
        del inputs
    record("attention of wide heads, peak bytes by length", peaks)
    assert peaks[16384] <= 6 * peaks[4096]  # 4 times the tokens; scores would be 16 times the bytes
