"""Plans that count prompts as this package's attention reads them: against what was measured, and where they may."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import Gemma4CompatError, cli
from gemma4_compat._engine import dormant, versions
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._generation.prompts import chunks
from gemma4_compat._kernels.specs import flash
from gemma4_compat._memory import formulas
from gemma4_compat._memory.blueprint import describe
from gemma4_compat._memory.formulas import Load
from gemma4_compat._plan import plan, prompt_kernels, speed
from tests.helpers import gpu
from tests.unit.memory.measured import watched
from tests.unit.memory.models import VARIANTS
from tests.unit.memory.test_long_contexts import CONTEXT, _blueprint
from tests.unit.memory.test_prompt_memory import CASES, attention_of, peak
from tools.pages import contexts

GIB = 1 << 30
FIGURES = "82 SMs, 1.7 GHz, 936 GB/s"
#: A chunk's graph keeps a mask, where there is room: 0.25 GiB, which the E2B did not have in 4.
ABOVE = {"E2B": 1.09, "E4B": 1.03, "26B-A4B": 1.03}


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Attention on meta by this package's kernels, not launched. Yields for each call whether it has a mask."""
    import torch

    from gemma4_compat._kernels.match import custom
    from gemma4_compat._kernels.match import reading as of_prompts

    calls: list[bool] = []
    kernels = flash.kernels
    monkeypatch.setattr(of_prompts, "_passes", lambda call: True)
    monkeypatch.setattr(custom, "launch", lambda device, *kernels: None)
    monkeypatch.setattr(
        flash, "kernels", lambda call, *rest: (calls.append(call.mask is not None), kernels(call, *rest))[1]
    )
    custom.operators()
    with of_prompts.Reading(torch.device("meta")):
        yield calls


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_attention_takes_what_is_planned(variant: str, ours: list[bool]) -> None:
    """Never more; and less by a second mask at most, and by what is left of the room for sums."""
    model = attention_of(variant, "sdpa")
    described = describe(model)
    for context, chunk in CASES:
        load = Load(context=context, prefill_chunk=chunk, fast=True, own_in_chunks=True)
        planned = formulas.activations(described, described.layers, load, prefill=True, head=False)
        planned -= sum(formulas.kv_cache(block, load, 2, prefill=False) for block in described.layers)
        ours.clear()
        measured = peak(model, context, chunk, static=True)
        assert ours == [True] * len(described.layers), (context, chunk)
        assert measured <= 1.002 * planned, (context, chunk)
        assert planned <= 1.03 * (measured + chunk * context + flash.WORKSPACE), (context, chunk)


@pytest.mark.parametrize("batch, heads, kv_heads", [(1, 8, 1), (1, 32, 4), (5, 16, 8), (32, 8, 2), (16, 32, 16)])
@pytest.mark.parametrize("width", [256, 512])
def test_sums_take_what_is_planned(batch: int, heads: int, kv_heads: int, width: int) -> None:
    import torch

    query, key = (
        torch.empty((batch, count, 4096, width), dtype=torch.bfloat16, device="meta") for count in (heads, kv_heads)
    )
    keys = key.repeat(1, 1, 4, 1)
    mask = torch.empty((batch, 1, 4096, 16_384), dtype=torch.bool, device="meta")
    call = flash.match(query, keys, keys, mask, enable_gqa=True)
    assert call is not None
    with watched() as counts:
        _, result = flash.kernels(call)
    found = counts["peak"] - result.untyped_storage().nbytes() - 16 * batch * 4096  # where each token's keys are
    assert 0 < found <= 1.01 * flash.workspace(batch, heads, width)


@pytest.mark.parametrize("shape", contexts.SHAPES)
def test_measured_contexts_take_what_is_planned(shape: str) -> None:
    if not contexts.MEASURED.is_dir() or versions.installed("transformers") != contexts.RELEASE:
        pytest.skip(f"measured with transformers {contexts.RELEASE}, and an sdist has no results")
    run, found = contexts.measured(shape), contexts.planned(shape)
    tensors = GIB * max(one["peak_gib"] for one in run["ways"]["chosen"]["runs"])
    assert tensors <= found["peak"] <= ABOVE[shape] * tensors
    assert found["peak"] <= run["budget_gib"] * GIB
    assert contexts.planned(shape, own=False)["peak"] > 1.1 * found["peak"]


# ------------------------------------------------------------------------------------------------------ what is known


def planned(model: str = "E4B", vram: Any = "8GiB", **options: Any) -> gemma4_compat.Plan:
    return gemma4_compat.plan_device_map(model, vram, **{"context": CONTEXT, **options})


def test_a_named_card_reads_larger_chunks_in_the_same_memory() -> None:
    unknown, named = planned(), planned(card="RTX 4060")
    assert (unknown.own_attention, named.own_attention) == (False, True)
    assert (unknown.copies_because, named.copies_because) == (prompt_kernels.UNKNOWN, "")
    assert unknown.prefill_chunk is not None
    assert named.prefill_chunk is not None
    assert unknown.prefill_chunk < named.prefill_chunk
    assert named.use[0].peak <= named.use[0].budget
    assert "decode_fast(model)" in named.code


@pytest.mark.parametrize("name", [name for name, card in speed.CARDS.items() if card.capability >= speed.BFLOAT16])
def test_known_cards_have_these_kernels(name: str) -> None:
    """Also for heads 512 wide, in the 99 KiB of shared memory that the smallest have."""
    assert prompt_kernels.capability("8GiB", name) >= prompt_kernels.LEAST  # type: ignore[operator]
    assert all(flash.tiling(width, 99 << 10) is not None for width in (256, 512))


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({}, prompt_kernels.UNKNOWN),
        ({"card": FIGURES}, prompt_kernels.UNKNOWN),
        ({"card": f"{FIGURES}, 24GiB/s, compute capability 8.6"}, ""),
        ({"card": f"{FIGURES}, compute capability 12.0"}, ""),
        ({"card": f"{FIGURES}, compute capability 7.5"}, "this package's kernels need compute capability 8.0"),
    ],
)
def test_a_card_by_its_figures(options: dict[str, Any], because: str) -> None:
    found = planned("E2B", "6GiB", **options)
    assert found.fast
    assert found.own_attention is not bool(because)
    assert found.copies_because.startswith(because)
    assert bool(found.copies_because) is bool(because)


def test_the_peaks_with_copies_are_those_of_a_plan_without_a_card() -> None:
    options: dict[str, Any] = {"prefill_chunk": 512}
    unknown, old = (
        planned("E2B", "6GiB", **options),
        planned("E2B", "6GiB", card=f"{FIGURES}, compute capability 7.5", **options),
    )
    assert unknown.use == old.use
    named = planned("E2B", "6GiB", card="L4", **options)
    assert named.use[0].prefill < unknown.use[0].prefill
    assert named.use[0].decode == unknown.use[0].decode


@pytest.mark.parametrize("options", [{"attention": "eager"}, {"fast": False}, {"context": 1024}])
def test_a_load_without_these_kernels_is_as_without_a_card(options: dict[str, Any]) -> None:
    named, unknown = (
        planned("E2B", "40GiB", **{"context": 8192, "prefill_chunk": 512, "card": card} | options)
        for card in ("L4", None)
    )
    assert (named.own_attention, named.copies_because) == (False, "")
    assert (named.use, named.prefill_chunk) == (unknown.use, unknown.prefill_chunk)


def test_where_the_kernels_have_no_way_in_pytorch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    named = planned("E2B", "6GiB", card="L4")
    monkeypatch.setattr(dormant, "is_installed", lambda patch_id: patch_id != windows.ID)
    without = planned("E2B", "6GiB", card="L4")
    assert named.own_attention
    assert without.copies_because == f"the patch {windows.ID} is off"
    assert without.use == planned("E2B", "6GiB").use


def test_heads_without_kernels(workspace: Any) -> None:
    model = plan.build.on_meta(str(workspace.checkpoint))[0]
    found = prompt_kernels.unsupported_reason(describe(model), Load(context=4096), (9, 0))
    assert found == "this package has no kernels for the model's heads"


def test_an_assistant_of_a_model_with_experts_in_bfloat16_has_transformers_read_the_prompt() -> None:
    load, plain = Load(context=4096, assistant=1), describe(plan.build.on_meta("26B-A4B")[0])
    assert "transformers reads the prompt" in prompt_kernels.unsupported_reason(plain, load, (9, 0))
    for variant in ("E4B", "26B-A4B"):
        assert prompt_kernels.unsupported_reason(_blueprint(variant), load, (9, 0)) == ""


def test_this_machines_gpus_count_where_the_plan_is_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where ``vram`` is given, which may be another's."""
    import torch

    kinds = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (9 << 30, 24 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu(*kinds[device.index]))
    assert planned("E2B", None).copies_because.endswith("the card has 7.5")
    kinds.pop()
    assert planned("E2B", None).own_attention
    assert planned("E2B", "6GiB").copies_because == prompt_kernels.UNKNOWN
    monkeypatch.setattr(torch.version, "hip", "7.1")  # there (9, 0) is AMD's gfx90a, for which there are no kernels
    kinds.append((11, 0))
    found = planned("E2B", None)
    assert (found.own_attention, found.copies_because) == (False, "this package's kernels need CUDA")
    assert found.source.dtype == "bfloat16"
    with pytest.raises(Gemma4CompatError) as caught:
        planned("31B", "16GiB")
    assert "--card" not in str(caught.value)


# ------------------------------------------------------------------------------------------------------- what it says


def test_a_refusal_names_cards_that_would_do() -> None:
    with pytest.raises(Gemma4CompatError, match=r"does not fit into 16.00 GiB.* name the card as well \(--card"):
        planned("31B", "16GiB")
    found = planned("31B", "16GiB", card="RTX 4080")
    assert (found.own_attention, found.fast) == (True, True)
    with pytest.raises(Gemma4CompatError) as caught:
        planned("31B", "12GiB", card="RTX 4070")
    assert "--card" not in str(caught.value)
    context = int(str(caught.value).partition("or a context of ")[2].split()[0])
    assert planned("31B", "12GiB", card="RTX 4070", context=context).own_attention


def test_what_it_says() -> None:
    def says(*arguments: str) -> str:
        result = CliRunner().invoke(cli.app, ["plan", "E2B", "--vram", "4GiB", "--context", "131072", *arguments])
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split())

    assert f"makes, because {prompt_kernels.UNKNOWN}. From 8.0 on, fast decoding makes none: --card" in says()
    assert "Chunks are read with this package's attention, which makes no copies" in says("--card", "L4")
    assert "attention" not in says("--card", "L4", "--no-fast")
    data = json.loads(says("--card", "L4", "--json"))
    assert (data["own_attention"], data["copies_because"]) == (True, "")


@pytest.mark.parametrize("variant", ["E2B", "31B"])
def test_longer_texts_never_need_less(variant: str) -> None:
    """Where kernels of this package begin to compute, shorter texts may take more."""
    used = [
        gemma4_compat.plan_device_map(variant, "80GiB", context=context, card="H100", prefill_chunk=512).use[0].peak
        for context in (flash.POSITIONS - 1, flash.POSITIONS, flash.POSITIONS + 1, 4 * flash.POSITIONS)
    ]
    assert used == sorted(used)


def test_several_rows_and_images() -> None:
    named, unknown = (planned("E4B", "24GiB", batch=4, card=card) for card in ("H100", None))
    assert named.own_attention
    assert named.use[0].prefill < unknown.use[0].prefill
    named, unknown = (planned("E4B", "48GiB", vision=True, context=8192, card=card) for card in ("H100", None))
    assert (named.own_attention, named.use) == (False, unknown.use)  # at once


def test_a_prompt_at_once_counts_with_copies() -> None:
    """Its peaks were not measured apart."""
    named, unknown = (planned("E4B", "24GiB", context=32_768, card=card) for card in ("H100", None))
    assert named.prefill_chunk is None
    assert (named.own_attention, named.copies_because, named.use) == (False, "", unknown.use)


def test_too_many_numbers_are_left_to_pytorch() -> None:
    """Offsets have 31 bits: a 31B's prompt of 131,072 tokens at once, not in chunks."""
    assert flash.reaches(32, 4, 512, tokens=chunks.SIZES[0], keys=CONTEXT)
    assert not flash.reaches(32, 4, 512, tokens=CONTEXT, keys=CONTEXT)
    assert not flash.reaches(32, 4, 512, tokens=chunks.SIZES[0], keys=CONTEXT, batch=2)  # its mask
