"""Keys and values that are made of one projection (``attention_k_eq_v``) have the bits of those that are kept.

:class:`Once` keeps what ``k_proj`` has computed, and what its norms multiply rows by. It makes keys and values of them
whenever attention reads them. It is no part of the package: docs/CACHES.md says why.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from gemma4_compat._engine import versions
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._lab import tiny, tiny_models
from tools.claims.storing import kept
from tools.pages import contexts, once

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="attention passes its cache in another way"
)
#: With heads as wide as in the released models: 512 numbers.
SHAPES = {"12B": 64, "26B-A4B": 64, "31B": 512}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Once(transformers.cache_utils.DynamicLayer):
    """The cache of one full layer."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.norms, self.rows, self.turns = (attention.k_norm, attention.v_norm), None, None
        self.held: list[torch.Tensor] = []  # (batch, tokens, ...): rows, factors, cosines and sines
        self.hooks = [
            attention.register_forward_pre_hook(self._begun, with_kwargs=True),
            attention.v_norm.register_forward_pre_hook(self._projected),
        ]

    def _begun(self, _module: Any, _args: Any, given: dict[str, Any]) -> None:
        self.turns = given["position_embeddings"]

    def _projected(self, _module: Any, args: tuple[Any, ...]) -> None:
        (self.rows,) = args

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Keys and values of all tokens. Those of the new ones are only compared."""
        of_keys, of_values = self.norms
        new = [self.rows, once.factor(self.rows, of_values.eps), *self.turns]
        self.held = [torch.cat(pair, dim=1) for pair in zip(self.held, new, strict=True)] if self.held else new
        found = once.remade(*self.held[:2], of_keys.weight, *self.held[2:])
        for ours, theirs in zip(found, (keys, values), strict=True):
            assert torch.equal(ours[:, :, -theirs.shape[2] :], theirs)
        return found

    def get_seq_length(self) -> int:
        return self.held[0].shape[1] if self.held else 0

    @property
    def nbytes(self) -> int:
        """Without angles, which are the same in all layers and are computed from positions."""
        return sum(one.nbytes for one in self.held[:2])


@functools.cache
def model_of(workspace: Any, shape: str, dtype: torch.dtype) -> Any:
    made = workspace.cached(tiny_models.build_checkpoint, variant=shape, full_width=SHAPES[shape])
    return tiny.load(made).to(dtype).eval()


def said(model: Any, *, keeps_once: bool, chunk: int | None) -> tuple[Any, int, int]:
    """Tokens and logits of two texts, one of them with padding; what full layers keep, and how many tokens of it."""
    cache = transformers.DynamicCache(config=model.config)
    layers = [layer.self_attn for layer in model.get_decoder().layers]
    full = [index for index, one in enumerate(layers) if one.use_alternative_attention]
    assert full
    for index in full if keeps_once else ():
        cache.layers[index] = Once(layers[index])
    ids = torch.randint(3, 200, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    options = {"do_sample": False, "min_new_tokens": 9, "max_new_tokens": 9, "prefill_chunk_size": chunk}
    kept_as = {cache_names.of(type(model).forward): cache}
    found = model.generate(
        ids, attention_mask=mask, **options, **kept_as, return_dict_in_generate=True, output_logits=True
    )
    ours = [cache.layers[index] for index in full]
    nbytes = sum(one.nbytes if keeps_once else one.keys.nbytes + one.values.nbytes for one in ours)
    for hook in (hook for one in ours if keeps_once for hook in one.hooks):
        hook.remove()
    return (found.sequences, torch.stack(found.logits)), nbytes, ours[0].get_seq_length()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_answers(workspace: Any, shape: str, dtype: torch.dtype) -> None:
    """A prompt at once and in chunks, whose other numbers of rows change no bit; half of the bytes, and factors."""
    model = model_of(workspace, shape, dtype)
    for chunk in (None, 4):
        expected, both, tokens = said(model, keeps_once=False, chunk=chunk)
        found, nbytes, held = said(model, keeps_once=True, chunk=chunk)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert held == tokens
        factors = both // (2 * SHAPES[shape] * dtype.itemsize) * 4
        assert nbytes == both // 2 + factors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_their_bits_in_any_company(dtype: torch.dtype) -> None:
    """On a CPU the norm itself has, so factors need not be kept; with factors each operation takes one number."""
    from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

    rows = torch.randn(1, 131, 4, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = Gemma4RMSNorm(512, with_scale=False)
    whole, factors = norm(rows), once.factor(rows, norm.eps)
    assert torch.equal((rows.float() * factors).type_as(rows), whole)
    for size in (1, 2, 3, 7, 16, 130):
        for begin in range(0, rows.shape[1], size):
            part = rows[:, begin : begin + size]
            for given in (part, part.contiguous(), part.transpose(1, 2).contiguous().transpose(1, 2)):
                assert torch.equal(norm(given), whole[:, begin : begin + size])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_angles_have_their_bits_in_any_company(workspace: Any, dtype: torch.dtype) -> None:
    """They need not be kept: those of a step are those of the whole text."""
    model = model_of(workspace, "31B", dtype)
    rotary, like = model.get_decoder().rotary_emb, torch.empty(0, dtype=dtype)
    positions = torch.arange(99_000, 99_131)[None]
    whole = rotary(like, positions, "full_attention")
    for size in (1, 7, 64):
        for begin in range(0, 131, size):
            part = rotary(like, positions[:, begin : begin + size], "full_attention")
            for one, all_of_it in zip(part, whole, strict=True):
                assert torch.equal(one, all_of_it[:, begin : begin + size])


def test_keys_that_are_made_of_values_are_others() -> None:
    """Values are rounded: in 16 bits a key would be rounded twice. In float32 it is not."""
    assert once.differing("float32") == 0
    assert 0.2 < once.differing("bfloat16") < 0.3


def test_figures() -> None:
    """Of the 31B: what the planner counts now, and less than that."""
    now, less, with_one_layer, *_ = once.figures("31B", 131_072)
    assert now == kept("31B")
    assert now / 2 < less < with_one_layer < 0.61 * now
    assert once.shapes() == ["12B", "26B-A4B", "31B"]


def test_bytes_are_counted_as_operations_move_them() -> None:
    one, other = torch.empty(8, device="meta"), torch.empty(8, device="meta")
    assert once.moved(lambda: (one + other).view(2, 4)) == 3 * 32


def test_the_table_is_what_is_computed() -> None:
    if versions.installed("transformers") != contexts.RELEASE:
        pytest.skip(f"the page is for transformers {contexts.RELEASE}")
    text = once.PAGE.read_text(encoding="utf-8")
    assert once.page(text) == text, "python -m tools.pages.once"
