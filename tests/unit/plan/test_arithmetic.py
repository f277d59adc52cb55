"""Placing blocks, sizes and text, on blueprints written by hand: no torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.io.text import parse_size, runs, size_text
from gemma4_compat._memory import layout
from gemma4_compat._memory.blueprint import Attention, Block, Blueprint, Size, rounded
from gemma4_compat._memory.formulas import Load
from gemma4_compat._memory.use import Share, Use, use_of
from gemma4_compat._plan import code
from gemma4_compat._plan import text as _plan_text
from gemma4_compat._plan.result import Plan, Rate, Source
from tests.unit.engine.test_import_cost import UPSTREAM, imported_by

MIB = 1 << 20
LOAD = Load(context=256)


def size(nbytes: int) -> Size:
    return Size(nbytes=nbytes, allocated=rounded(nbytes), leaf=nbytes // 4)


def block(name: str, kind: Any, nbytes: int, **options: Any) -> Block:
    return Block(
        name=name,
        kind=kind,
        stored=size(nbytes),
        plain=size(4 * nbytes),
        workspace=nbytes // 8,
        loading=nbytes if kind == "layer" else 0,
        **options,
    )


def blueprint(layers: int = 12, *, tied: bool = True, adapter: int = 0) -> Blueprint:
    """A language model with a table and two towers; every third layer is larger and has full attention."""
    blocks = [
        block("model.vision_tower", "tower", 30 * MIB, modality="vision"),
        block("model.audio_tower", "tower", 40 * MIB, modality="audio"),
        block("model.language_model.embed_tokens", "embedding", 60 * MIB),
    ]
    for index in range(layers):
        full = index % 3 == 2
        attention = Attention(
            heads=8, kv_heads=2, head_dim=64, kv_width=128, window=None if full else 64, shared=index >= layers - 3
        )
        name = f"model.language_model.layers.{index}"
        mib = 12 if full else 10
        blocks.append(block(name, "layer", mib * MIB, attention=attention, intermediate=2048, adapter=adapter))
    blocks += [
        block("model.language_model.norm", "rest", 4096),
        block("model.language_model.embed_tokens_per_layer", "per_layer_embedding", 400 * MIB),
        block("lm_head", "head", 0 if tied else 60 * MIB, tied="model.language_model.embed_tokens" if tied else None),
    ]
    return Blueprint(
        blocks=tuple(blocks),
        model_class="Gemma4ForConditionalGeneration",
        quantization="4bit",
        item=2,
        hidden=512,
        vocabulary=10000,
        per_layer_width=layers * 64,
    )


MODEL = blueprint()
LEAST = layout.smallest_budget(MODEL, LOAD)
BUDGETS = [*range(LEAST, 800 * MIB, 7 * MIB), 1 << 40]


def away(placed: layout.Layout, kind: str, model: Blueprint = MODEL) -> set[str]:
    """Names of the blocks of that kind that are not on an accelerator."""
    names = {block.name for block in model.blocks if block.kind == kind}
    return {name for name in names if placed.device_map[name] not in placed.use}


@pytest.mark.parametrize("kind", ["per_layer_embedding", "tower", "layer"])
def test_everything_stays_on_the_accelerator_where_it_fits(kind: str) -> None:
    placed = layout.layout(MODEL, {0: 1 << 40}, LOAD)
    assert away(placed, kind) == set()
    assert (set(placed.device_map.values()), placed.cpu, placed.disk) == ({0}, 0, 0)


def test_the_smallest_budget_fits_and_a_byte_less_is_refused() -> None:
    assert layout.layout(MODEL, {0: LEAST}, LOAD).use[0].peak == LEAST
    with pytest.raises(Gemma4CompatError, match="does not fit"):
        layout.layout(MODEL, {0: LEAST - 1}, LOAD)


def test_weights_alone_take_what_is_stored_and_two_layers() -> None:
    alone = replace(LOAD, weights_only=True)
    least = layout.smallest_budget(MODEL, alone)
    assert least < LEAST
    use = layout.layout(MODEL, {0: least}, alone).use[0]
    assert (use.kv, use.peak) == (0, least)
    assert use.prefill == use.decode == use.weights + use.stream_buffers


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_placement_stays_inside_its_budget_and_covers_every_block_once(budget: int) -> None:
    placed = layout.layout(MODEL, {0: budget}, LOAD)
    assert placed.use[0].peak <= budget
    assert sorted(placed.device_map) == sorted(block.name for block in MODEL.blocks)
    stays = [block for block in MODEL.blocks if placed.device_map[block.name] == 0]
    assert placed.use[0].weights == sum(block.stored.allocated for block in stays)
    assert next(iter(placed.device_map.values())) == 0


@pytest.mark.parametrize("load", [LOAD, replace(LOAD, vision=True), replace(LOAD, audio=True, batch=4)])
def test_more_memory_never_offloads_more_and_the_cheapest_leaves_first(load: Load) -> None:
    budgets = range(layout.smallest_budget(MODEL, load), 900 * MIB, 7 * MIB)
    placed = [layout.layout(MODEL, {0: budget}, load) for budget in budgets]
    for kind in ("per_layer_embedding", "tower", "layer"):
        counts = [len(away(item, kind)) for item in placed]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] > 0
        assert counts[-1] == 0
    for item in placed:
        if away(item, "tower"):
            assert away(item, "per_layer_embedding")
        if away(item, "layer"):
            assert len(away(item, "tower")) == 2
            assert set(item.streamed) == away(item, "layer")
        assert away(item, "embedding") == away(item, "head") == set()


def test_an_unused_tower_leaves_before_a_used_one() -> None:
    for modality, other in (("vision", "audio"), ("audio", "vision")):
        load = replace(LOAD, **{modality: True})  # type: ignore[arg-type]
        budgets = range(layout.smallest_budget(MODEL, load), 800 * MIB, 7 * MIB)
        seen = [away(layout.layout(MODEL, {0: budget}, load), "tower") for budget in budgets]
        assert {f"model.{other}_tower"} in seen
        assert {f"model.{modality}_tower"} not in seen


@pytest.mark.parametrize("budget", BUDGETS[::4])
def test_as_few_layers_as_needed_are_paged(budget: int) -> None:
    """One fewer does not fit, whichever layers are taken."""
    placed = layout.layout(MODEL, {0: budget}, LOAD)
    if len(placed.streamed) <= 3:
        assert len(placed.streamed) in (0, 3)  # two buffers: the first two layers would free nothing
        return
    evicted = [block for block in MODEL.blocks if block.kind in ("per_layer_embedding", "tower")]
    rest = [block for block in MODEL.blocks if block.kind not in ("per_layer_embedding", "tower", "layer")]
    for streamed in itertools.combinations(MODEL.layers, len(placed.streamed) - 1):
        resident = [*rest, *(layer for layer in MODEL.layers if layer not in streamed)]
        use = use_of(MODEL, Share(resident=resident, streamed=streamed, evicted=evicted), LOAD, budget=budget)
        assert use.peak > budget


def test_an_untied_embedding_leaves_for_its_rows_and_the_head_stays() -> None:
    model = blueprint(tied=False)
    placed = layout.layout(model, {0: layout.smallest_budget(model, LOAD)}, LOAD)
    assert placed.device_map["model.language_model.embed_tokens"] == "cpu"
    assert placed.device_map["lm_head"] == 0


def test_bf16_layers_need_larger_buffers_and_the_refusal_says_so() -> None:
    model = MODEL.offloading(quantized=False)
    plain = layout.smallest_budget(model, LOAD)
    assert plain > LEAST
    with pytest.raises(Gemma4CompatError, match=r"quantize\(offloaded=True\)"):
        layout.layout(model, {0: plain - MIB}, LOAD)


def test_adapters_of_paged_layers_stay_on_the_accelerator() -> None:
    model = blueprint(adapter=MIB)
    placed = layout.layout(model, {0: layout.smallest_budget(model, LOAD)}, LOAD)
    assert placed.streamed
    assert placed.use[0].adapter == 12 * MIB


# --------------------------------------------------------------------------------------------------------- host memory


def test_the_table_goes_to_the_disk_before_anything_else() -> None:
    whole = layout.layout(MODEL, {0: LEAST}, LOAD)
    assert whole.disk == 0
    seen = []
    for cpu in (*range(0, whole.cpu, 10 * MIB), whole.cpu):
        placed = layout.layout(MODEL, {0: LEAST}, LOAD, cpu=cpu)
        assert placed.cpu <= cpu
        assert placed.cpu + placed.disk == whole.cpu
        on_disk = {name for name, device in placed.device_map.items() if device == "disk"}
        seen.append(len(on_disk))
        if on_disk:
            assert "model.language_model.embed_tokens_per_layer" in on_disk
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0


def test_too_little_host_memory_and_disk_is_refused_with_what_is_missing() -> None:
    with pytest.raises(Gemma4CompatError, match=r"must leave the accelerator.* give \d+ MiB more of either"):
        layout.layout(MODEL, {0: LEAST}, LOAD, cpu=10 * MIB, disk=10 * MIB)


# ------------------------------------------------------------------------------------------------ several accelerators


@pytest.mark.parametrize("second", [40 * MIB, 90 * MIB, 300 * MIB])
@pytest.mark.parametrize("first", [LEAST, LEAST + 60 * MIB, 700 * MIB])
def test_several_accelerators_stay_inside_their_budgets(first: int, second: int) -> None:
    placed = layout.layout(MODEL, {0: first, 1: second}, LOAD)
    alone = layout.layout(MODEL, {0: first}, LOAD)
    assert all(use.peak <= use.budget for use in placed.use.values())
    assert len(placed.streamed) <= len(alone.streamed)
    assert sorted(placed.device_map) == sorted(block.name for block in MODEL.blocks)
    main = next(iter(placed.use))
    assert next(iter(placed.device_map.values())) == main
    order = [placed.device_map[layer.name] for layer in MODEL.layers]
    changes = sum(1 for one, two in itertools.pairwise(order) if 1 in (one, two) and one != two)
    assert changes <= 1  # a hidden state crosses once


def test_a_first_accelerator_that_is_too_small_does_not_hold_the_embedding() -> None:
    placed = layout.layout(MODEL, {0: 20 * MIB, 1: 1 << 40}, LOAD)
    assert placed.device_map["lm_head"] == placed.device_map["model.language_model.embed_tokens"] == 1
    assert next(iter(placed.device_map.values())) == 1


def test_balanced_fills_both_about_equally() -> None:
    budgets = {0: 1 << 30, 1: 1 << 30}
    filled = layout.layout(MODEL, budgets, LOAD)
    assert set(filled.device_map.values()) == {0}
    model = replace(
        MODEL, blocks=tuple(block for block in MODEL.blocks if block.kind not in ("per_layer_embedding", "tower"))
    )
    even = layout.layout(model, budgets, LOAD, balanced=True)
    peaks = [use.peak for use in even.use.values()]
    assert len(peaks) == 2
    assert max(peaks) - min(peaks) < 40 * MIB
    assert all(use.budget == 1 << 30 for use in even.use.values())


# ------------------------------------------------------------------------------------------------------------ refusals


def test_the_refusal_names_a_context_that_fits() -> None:
    long = replace(LOAD, context=100_000)
    with pytest.raises(Gemma4CompatError) as caught:
        layout.layout(MODEL, {0: LEAST}, long)
    context = int(str(caught.value).split("a context of ")[2].split()[0])
    assert context >= LOAD.context
    layout.layout(MODEL, {0: LEAST}, replace(long, context=context))
    with pytest.raises(Gemma4CompatError):
        layout.layout(MODEL, {0: LEAST}, replace(long, context=context + 1))


def test_the_refusal_names_a_budget_that_fits() -> None:
    with pytest.raises(Gemma4CompatError) as caught:
        layout.layout(MODEL, {0: 1 * MIB}, LOAD)
    text = str(caught.value).split("What would fit: ")[1].split(" on one accelerator")[0]
    layout.layout(MODEL, {0: parse_size(text)}, LOAD)


def test_the_refusal_names_a_smaller_batch() -> None:
    with pytest.raises(Gemma4CompatError, match="a batch of 1"):
        layout.layout(MODEL, {0: LEAST}, replace(LOAD, batch=64))


@pytest.mark.parametrize(
    "budgets, load, message",
    [
        ({}, LOAD, "no accelerator"),
        ({0: 0}, LOAD, "must be positive"),
        ({0: 1}, Load(context=0), "context is 0"),
        ({0: 1}, Load(batch=0), "batch is 0"),
        ({0: 1}, Load(prompt=0), "prompt is 0"),
        ({0: 1}, Load(attention="flash"), "attention 'flash' is unknown"),
    ],
)
def test_what_makes_no_sense_is_refused(budgets: dict[int, int], load: Load, message: str) -> None:
    with pytest.raises(Gemma4CompatError, match=message):
        layout.layout(MODEL, budgets, load)


@pytest.mark.parametrize("budget", BUDGETS[::9])
def test_the_longest_context_of_a_placement_fits_it_exactly(budget: int) -> None:
    placed = layout.layout(MODEL, {0: budget}, LOAD)
    longest = layout.longest_context(MODEL, {0: budget}, LOAD, limit=1 << 20, placed=placed)
    assert longest >= LOAD.context
    if longest == 1 << 20:
        return
    for context, fits in ((longest, True), (longest + 1, False)):
        use = layout.placed_use(MODEL, placed, replace(LOAD, context=context))
        assert (use[0].peak <= budget) is fits


# --------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    "text, expected",
    [
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8GB", 8 * 10**9),
        ("500MB", 500 * 10**6),
        ("1.5GiB", 3 << 29),
        ("64KiB", 64 << 10),
        ("8589934592", 8 << 30),
        ("0", 0),
        (123, 123),
        (2.5 * 2**30, 5 << 29),
        ("7B", 7),
    ],
)
def test_sizes(text: float | str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "8 G",
        "-8GiB",
        "8GiBs",
        "1e9",
        "1.5",
        "eight",
        -1,
        True,
        "8,5GiB",
        math.nan,
        math.inf,
        "9" * 5000,
        "9" * 5000 + "GiB",
    ],
)
def test_what_is_no_size_is_refused_with_examples(text: float | str) -> None:
    with pytest.raises(Gemma4CompatError, match="is not a size; write it as 8GiB") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["12", " 80 ", "1.5", "500000"])
def test_a_number_that_lacks_its_unit_is_asked_back(text: str) -> None:
    with pytest.raises(Gemma4CompatError, match=rf"in bytes: did you mean {text.strip()}GiB\?"):
        parse_size(text)


@pytest.mark.parametrize("nbytes", [1, MIB + 1, (1 << 30) - 1, (1 << 30) + 1, 12345678901])
def test_a_size_written_up_is_enough(nbytes: int) -> None:
    assert parse_size(size_text(nbytes, up=True)) >= nbytes


# ---------------------------------------------------------------------------------------------------------------- text


def a_plan(budget: int = LEAST + 30 * MIB) -> Plan:
    placed = layout.layout(MODEL, {0: budget}, LOAD)
    source = Source(
        model="folder",
        model_class=MODEL.model_class,
        quantization="4bit",
        skip=("lm_head",),
        assumed="something",
    )
    return Plan(
        source=source,
        layout=placed,
        load=LOAD,
        rate=Rate(slow_because="it was not asked for"),
        longest_context=300,
        code=code.loading_code(source, placed, LOAD),
    )


@pytest.mark.parametrize("width", [50, 72, 100])
@pytest.mark.parametrize("blocks", [True, False])
def test_the_report_stays_inside_its_width(width: int, blocks: bool) -> None:
    text = _plan_text.plan_text(a_plan(), width=width, blocks=blocks)
    report = text.partition("\nimport gemma4_compat")[0]
    assert max(map(len, report.splitlines())) <= width
    assert text.isascii() is not blocks


def test_a_bar_shows_shares_of_the_budget() -> None:
    use = Use(weights=40, stream_buffers=10, adapter=0, kv=10, loading=0, prefill=80, decode=70, budget=100)
    assert (
        _plan_text.bar(_plan_text._parts(use), 100, 50, "wpkt.") == "w" * 20 + "p" * 5 + "k" * 5 + "t" * 10 + "." * 10
    )


@pytest.mark.parametrize("encoding, expected", [("utf-8", True), ("ascii", False), (None, False), ("nonsense", False)])
def test_outputs_without_the_characters_get_ascii(encoding: str | None, expected: bool) -> None:
    assert _plan_text.can_show_blocks(encoding) is expected


@pytest.mark.parametrize("budget", BUDGETS[::6])
def test_the_map_in_the_code_is_the_map(budget: int) -> None:
    plan = a_plan(budget)
    lines = plan.code.splitlines()
    start, end = lines.index("device_map = {"), lines.index("}")
    names: dict[str, Any] = {}
    exec("\n".join(lines[start : end + 1]), names)
    assert names["device_map"] == plan.device_map


def test_runs() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == [(0, 2), (5, 5), (7, 8)]


@pytest.mark.parametrize("name", ["E4B", "e4b", "gemma-4-E4B-it", "google/gemma-4-e4b"])
def test_variants_are_found_by_their_names(name: str) -> None:
    from gemma4_compat._gemma4.models import variants

    assert variants.find(name) == "E4B"
    assert variants.find("E4C") is None


def test_arithmetic_on_a_blueprint_imports_no_library() -> None:
    loaded = imported_by("from gemma4_compat._plan import code, plan, text")
    assert "gemma4_compat._memory.layout" in loaded
    assert not {name.partition(".")[0] for name in loaded} & set(UPSTREAM)
