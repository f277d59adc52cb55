"""Plans for fast decoding (``gemma4_compat.decode_fast``): static cache, temporaries, graphs, code and text."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

import gemma4_compat
from gemma4_compat import cli
from gemma4_compat._gemma4.models import variants
from gemma4_compat._graphs import unsupported
from gemma4_compat._lab import tiny_configs
from gemma4_compat._memory import formulas, layout
from gemma4_compat._memory.blueprint import Blueprint, describe, rounded
from gemma4_compat._memory.formulas import MEASURED, Load
from gemma4_compat._memory.use import Share, Use, use_of
from gemma4_compat._plan import code, prompt_kernels, speed
from gemma4_compat._plan import plan as _plan
from gemma4_compat._plan import text as _plan_text
from tests.unit.memory.measured import cached, storages, watched
from tests.unit.memory.models import VARIANTS, planned, run
from tests.unit.plan.test_arithmetic import LEAST, LOAD, MIB, MODEL, a_plan, away

FAST = replace(LOAD, fast=True)
FAST_LEAST = layout.smallest_budget(MODEL, FAST)
WIDE = 1 << 40

# ------------------------------------------------------------------------------------------------------- static cache


@functools.cache
def tiny_text(variant: str, dtype: str) -> Any:
    """The language model of a tiny ``variant``."""
    import torch
    import transformers

    name = "Gemma4UnifiedForCausalLM" if variant == variants.UNIFIED else "Gemma4ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, name)(tiny_configs.config(variant=variant).text_config)
    return model.to(getattr(torch, dtype)).eval()


@pytest.mark.parametrize("context", [5, 8, 9, 40])
@pytest.mark.parametrize("batch, dtype", [(1, "bfloat16"), (3, "float32")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_static_cache_holds_what_is_planned(variant: str, batch: int, dtype: str, context: int) -> None:
    """The window is 8. It is all there after the prompt, and a step adds nothing."""
    import torch
    from transformers import StaticCache

    model = tiny_text(variant, dtype)
    cache = StaticCache(config=model.config, max_cache_len=context)
    expected = cached(describe(model), Load(context=context, batch=batch, fast=True), prefill=True)
    assert expected == cached(describe(model), Load(context=context, batch=batch, fast=True), prefill=False)
    ids = torch.randint(3, 240, (batch, context - 1))
    with torch.no_grad():
        for step in (ids, ids[:, :1]):
            model(input_ids=step, past_key_values=cache, use_cache=True)
            assert storages(cache) == expected


def test_a_static_cache_is_not_larger_than_the_default_one_at_the_end_of_the_context() -> None:
    for context in (8, 64, 100, 10_000):
        for block in MODEL.layers:
            loads = [replace(load, context=context) for load in (LOAD, FAST)]
            dynamic, static = (formulas.kv_cache(block, load, 2, prefill=False) for load in loads)
            assert static == dynamic
            dynamic, static = (formulas.kv_cache(block, load, 2, prefill=True) for load in loads)
            assert static <= dynamic


# -------------------------------------------------------------------------------------------------------- temporaries


@functools.cache
def real_text(variant: str) -> Any:
    """A variant's language model in real shapes on meta, with eager attention, whose scores are tensors."""
    import torch
    from transformers import Gemma4ForCausalLM

    with torch.device("meta"):
        model = Gemma4ForCausalLM._from_config(
            variants.config(variant).text_config, dtype=torch.bfloat16, attn_implementation="eager"
        )
    return model.eval()


@pytest.mark.parametrize(
    "variant, prompt, context",
    [
        ("E2B", 512, 2048),
        ("E4B", 2048, 2304),
        ("31B", 512, 2048),
        pytest.param("E2B", 2048, 2304, marks=pytest.mark.full),
        pytest.param("E4B", 512, 2048, marks=pytest.mark.full),
        pytest.param("31B", 2048, 2304, marks=pytest.mark.full),
    ],
)
def test_temporaries_of_a_prefill_and_of_a_step_are_as_measured(variant: str, prompt: int, context: int) -> None:
    """To 3 %, with the cache allocated in the prefill. Windows: 512 (E2B, E4B) and 1024 tokens."""
    import torch
    from transformers import StaticCache

    model = real_text(variant)
    described = planned(model, None)
    text = model.model
    cache = StaticCache(config=model.config, max_cache_len=context)
    for layer in cache.layers:
        if hasattr(layer, "cumulative_length"):  # on the CPU until the layer has its keys
            layer.cumulative_length = layer.cumulative_length.to("meta")

    def peak(tokens: int, **options: Any) -> int:
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        with torch.no_grad(), watched() as counts:
            embedded = text.embed_tokens(ids)
            rows = text.get_per_layer_inputs(ids, embedded) if described.per_layer_width else None
            text(inputs_embeds=embedded, per_layer_inputs=rows, past_key_values=cache, use_cache=True, **options)
        return counts["peak"]

    load = Load(context=context, prompt=prompt, attention="eager", fast=True)
    prefill, step = (
        formulas.activations(described, described.layers, load, prefill=phase, head=phase) for phase in (True, False)
    )
    held = sum(formulas.kv_cache(block, load, 2, prefill=False) for block in described.layers)
    options = {"logits_to_keep": 1} if described.one_query else {}
    assert prefill == pytest.approx(peak(prompt, **options), rel=0.03)
    assert step - held == pytest.approx(peak(1), rel=0.03)


def test_masks_of_a_prompt_are_those_that_transformers_makes() -> None:
    """For a prompt without padding in an empty static cache; the window is 8."""
    import torch
    from transformers import Gemma4ForCausalLM, StaticCache

    config = tiny_configs.config().text_config
    model = Gemma4ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    described = describe(model)
    attentions = {"sliding_attention": 8, "full_attention": None}
    for prompt, context in ((4, 7), (4, 8), (4, 40), (12, 40)):
        load = Load(context=context, prompt=prompt, fast=True)
        cache = StaticCache(config=model.config, max_cache_len=context)
        masks: dict[str, Any] = {}

        def look(module: Any, _args: Any, options: Any, masks: dict[str, Any] = masks) -> None:
            masks.setdefault(module.layer_type, options["attention_mask"])

        handles = [layer.self_attn.register_forward_pre_hook(look, with_kwargs=True) for layer in model.model.layers]
        with torch.no_grad():
            model(input_ids=torch.ones(1, prompt, dtype=torch.long), past_key_values=cache, use_cache=True)
        for handle in handles:
            handle.remove()
        for kind, window in attentions.items():
            found = [block.attention for block in described.layers if block.attention]
            attention = next(one for one in found if one.window == window)
            assert formulas._is_masked(described, attention, load, prefill=True) is (masks[kind] is not None)
            if masks[kind] is not None:
                assert masks[kind].shape[-1] == formulas._seen(attention, load, prefill=True)


# ------------------------------------------------------------------------------------------------------------- graphs


def pool(model: Blueprint = MODEL, streamed: tuple[int, ...] = (), load: Load = FAST, *, head: bool = True) -> int:
    return formulas.graph(model, model.layers, streamed, load, head=head)


def test_a_pool_holds_a_step_and_two_slots_and_the_logits() -> None:
    assert pool(load=LOAD) == pool(load=replace(FAST, weights_only=True)) == 0
    assert pool(streamed=(5 * MIB, 3 * MIB, 4 * MIB)) == pool() + 2 * 5 * MIB
    assert pool(streamed=(5 * MIB,)) == pool() + 5 * MIB
    held = sum(formulas.kv_cache(block, FAST, 2, prefill=False) for block in MODEL.layers)
    step = formulas.activations(MODEL, MODEL.layers, FAST, prefill=False, head=True) - held
    assert step > 0
    assert pool() == step + MEASURED.blas_workspace + MEASURED.graphs * rounded(2 * MODEL.vocabulary)


def test_what_was_measured_of_a_pool_is_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pool(streamed=(MIB, MIB))
    fixed = before - pool(streamed=())
    step = pool() - MEASURED.blas_workspace - MEASURED.graphs * rounded(2 * MODEL.vocabulary)
    monkeypatch.setattr(formulas, "MEASURED", replace(MEASURED, graph_pool=1.5, graph_slots=1))
    assert pool(streamed=(MIB, MIB)) == pytest.approx(before - fixed // 2 + step / 2, abs=1)


def test_batches_need_larger_pools() -> None:
    sizes = [pool(load=replace(FAST, batch=batch)) for batch in (1, 2, 8)]
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("budget", [*range(FAST_LEAST, 800 * MIB, 40 * MIB), WIDE])
def test_a_placement_for_fast_decoding_stays_inside_its_budget(budget: int) -> None:
    placed = layout.layout(MODEL, {0: budget}, FAST)
    use = placed.use[0]
    assert use.peak <= budget
    streamed = [block.stored.allocated for block in MODEL.layers if block.name in placed.streamed]
    assert use.graph == pool(streamed=tuple(streamed))
    assert use.stream_buffers == (2 * max(streamed) if streamed else 0)
    assert min(use.prefill, use.decode) > use.weights + use.stream_buffers + use.graph
    assert placed.brought == sum(block.stored.nbytes for block in MODEL.layers if block.name in placed.streamed)


# -------------------------------------------------------------------------------------------------- with it or without


def chosen(model: Blueprint, budgets: dict[Any, int], *, fast: bool = True, **options: Any) -> tuple[Any, Load, str]:
    given = {"cpu": None, "disk": None, "balanced": False} | options
    return _plan._placed(model, budgets, LOAD, given, fast=fast)


def test_a_plan_is_for_fast_decoding_where_it_fits() -> None:
    placed, load, slow_because = chosen(MODEL, {0: FAST_LEAST})
    assert (placed.use[0].peak, load, slow_because) == (FAST_LEAST, FAST, "")
    placed, load, slow_because = chosen(MODEL, {0: FAST_LEAST - 1})
    assert load == LOAD
    assert "do not fit" in slow_because
    assert placed.use[0].graph == 0
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="does not fit"):
        chosen(MODEL, {0: LEAST - 1})


@pytest.mark.parametrize(
    "model, budgets, options, reason",
    [
        (MODEL, {"cuda:1": WIDE}, {}, ""),
        (MODEL, {"cuda": WIDE}, {}, ""),
        (MODEL, {0: WIDE}, {"fast": False}, "not asked for"),
        (MODEL, {"cpu": WIDE}, {}, "need CUDA"),
        (MODEL, {"xpu:0": WIDE}, {}, "need CUDA"),
        (replace(MODEL, quantization="8bit"), {0: WIDE}, {}, "8-bit layers synchronize"),
        (replace(MODEL, quantization=None), {0: WIDE}, {}, ""),
        (MODEL, {0: WIDE, 1: WIDE}, {}, ""),  # one holds all
        (MODEL, {0: WIDE, 1: WIDE}, {"balanced": True}, "one accelerator"),
        (MODEL, {0: FAST_LEAST}, {"cpu": 0}, "disk are read by the host"),
        (MODEL, {0: FAST_LEAST}, {"cpu": 300 * MIB}, "disk are read by the host"),  # the table
    ],
)
def test_a_plan_says_why_it_is_without(
    model: Blueprint, budgets: dict[Any, int], options: dict[str, Any], reason: str
) -> None:
    placed, load, slow_because = chosen(model, budgets, **options)
    assert load.fast is (not reason)
    assert reason in slow_because
    assert bool(slow_because) is bool(reason)
    assert any(use.graph for use in placed.use.values()) is (not reason)


@pytest.mark.parametrize("quantization, split", [(None, False), (None, True), ("4bit", False), ("8bit", False)])
def test_a_plan_is_without_it_where_the_loaded_model_is(
    workspace: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, quantization: str | None, split: bool
) -> None:
    """``decode_fast`` finds the same on the model that the plan's code loads; a CPU stands for the card."""
    monkeypatch.chdir(tmp_path)
    checkpoint = str(workspace.checkpoint)
    described = planned(_plan.build.on_meta(checkpoint)[0], quantization)
    budget = layout.smallest_budget(described, Load(context=64)) if split else WIDE
    plan = gemma4_compat.plan_device_map(checkpoint, {"cpu": budget}, context=64, quantize=quantization, cpu=0)
    placed = layout.layout(described, {"cpu": budget}, Load(context=64), cpu=0)
    assert plan.device_map == placed.device_map
    slow_because = _plan._slow_anywhere(described, {0: budget}) or _plan._slow_here(described, placed)
    reason = unsupported.lasting_reason(run(plan)["model"]) or ""
    assert bool(slow_because) is bool(reason), (slow_because, reason)
    for word in ("8-bit", "disk"):
        assert (word in slow_because) is (word in reason)


def test_towers_on_disk_do_not_matter() -> None:
    """They run in the prefill, which is not replayed."""
    model = replace(MODEL, blocks=tuple(block for block in MODEL.blocks if block.kind != "per_layer_embedding"))
    whole = layout.layout(model, {0: WIDE}, FAST).use[0].peak
    placed, load, _ = chosen(model, {0: whole - 1}, cpu=0)
    assert away(placed, "tower", model)
    assert placed.disk > 0
    assert load.fast


# --------------------------------------------------------------------------------------------------- code, text, JSON


def says(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_the_code_ends_with_it_and_says_what_it_does(workspace: Any) -> None:
    adapter = workspace.adapter("language")
    plan = gemma4_compat.plan_device_map(str(workspace.checkpoint), "1GiB", context=64, adapter=adapter)
    assert (plan.fast, plan.slow_because) == (True, "")
    lines = plan.code.splitlines()
    assert lines[-3:] == ["model.eval()", f"# {code.FAST}.", "gemma4_compat.decode_fast(model)"]
    assert "PeftModel.from_pretrained" in lines[-4]
    assert callable(gemma4_compat.decode_fast)
    compile(plan.code, "plan", "exec")


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--vram", "2GiB", "--cpu", "0B"], "weights on disk are read by the host for every token"),
        (["--vram", "8GiB", "--quantize", "8bit"], "bitsandbytes' 8-bit layers synchronize with the host"),
        (["--vram", "8GiB", "--no-fast"], "it was not asked for"),
    ],
)
def test_a_plan_without_it_says_why_and_does_not_call_it(arguments: list[str], reason: str) -> None:
    text = says("E2B", "--context", "1024", *arguments)
    assert f"No fast decoding: {reason}" in text
    assert "decode_fast" not in text


def test_the_report_says_what_it_is_and_what_bounds_it() -> None:
    text = says("E2B", "--vram", "1.3GiB", "--context", "1024")
    plan = gemma4_compat.plan_device_map("E2B", "1.3GiB", context=1024)
    assert plan.streamed
    assert "Fast decoding (gemma4_compat.decode_fast): static cache; the decoding step is replayed as one CUDA" in text
    assert "For PyTorch's bits: exact=True." in text
    assert f"Its graphs keep {layout.size_text(plan.use[0].graph)}." in text
    assert f"each token brings {layout.size_text(plan.brought)} over it" in text
    least, most = (round(100 * share) for share in speed.BUS_SHARE)
    assert f"replay of streamed layers reached {least} to {most} % of the bus." in text
    whole = says("E2B", "--vram", "80GiB", "--context", "1024")
    assert "The card limits its speed." in whole
    assert " bus" not in whole
    assert "gemma4_compat.decode_fast(model)" in whole


@pytest.mark.parametrize("width", [50, 72, 100])
@pytest.mark.parametrize("brought", [0, 917 * MIB])
def test_the_report_stays_inside_its_width(width: int, brought: int) -> None:
    plan = a_plan()
    shown = replace(plan, load=FAST, layout=replace(plan.layout, brought=brought), code="")
    report = _plan_text.plan_text(shown, width=width)
    assert "Fast decoding" in report
    assert max(map(len, report.splitlines())) <= width


def test_as_json() -> None:
    plan = gemma4_compat.plan_device_map("E2B", "1.3GiB", context=1024)
    data = json.loads(json.dumps(plan.as_data()))
    assert (data["fast"], data["slow_because"], data["brought"]) == (True, "", plan.brought)
    assert data["use"]["0"]["graph"] == plan.use[0].graph > 0


def test_what_a_token_brings_over_the_bus_is_what_was_measured() -> None:
    """benchmarks/results: 917 MiB for all layers of the E2B, 1,942 MiB of the E4B, in 4-bit double."""
    for variant, mib in (("E2B", 917), ("E4B", 1942)):
        described = planned(_plan.build.on_meta(variant)[0], "4bit-double")
        everything = sum(block.stored.nbytes for block in described.layers)
        assert everything // MIB == mib


def test_the_longest_context_of_a_fast_plan_fits_it() -> None:
    plan = gemma4_compat.plan_device_map("E2B", "3GiB", context=1024)
    assert plan.fast
    again = gemma4_compat.plan_device_map("E2B", "3GiB", context=plan.longest_context)
    assert (again.fast, again.device_map) == (True, plan.device_map)


# --------------------------------------------------------------------------------------------- the head in two stages


def test_a_plan_counts_the_copy_of_the_head() -> None:
    """It is made where as much again stays free, of the tensors that decoding copies it into."""
    import torch

    from gemma4_compat._kernels.specs import head

    plan = gemma4_compat.plan_device_map("E2B", "12GiB")
    (use,) = plan.use.values()
    copy = head.Copy.of(torch.empty(262_144, 1536, dtype=torch.bfloat16, device="meta"))
    assert use.head == sum(tensor.nbytes for tensor in copy[:3])
    assert use.decode + use.head <= use.budget
    assert f"a copy of the head in 8 bits {use.head >> 20} MiB" in " ".join(_plan_text.plan_text(plan).split())
    assert plan.as_data()["use"]["0"]["head"] == use.head


@pytest.mark.parametrize(
    "options",
    [{"fast": False}, {"batch": 9}, {"assistant": True}, {"vram": "2.8GiB", "context": 2048}],
    ids=lambda given: " ".join(given),
)
def test_a_plan_has_no_copy_of_the_head_where_none_is_made(options: dict[str, Any]) -> None:
    plan = gemma4_compat.plan_device_map("E2B", **{"vram": "12GiB", **options})
    (use,) = plan.use.values()
    assert use.head == 0
    assert "copy of the head" not in _plan_text.plan_text(plan)


def test_a_head_in_host_memory_counts_as_its_copy() -> None:
    """Steps and prompts of up to eight texts read the head there; more rows bring all of it to the accelerator."""
    described = planned(real_text("E2B"), None)
    tied = {block.name: block for block in described.blocks if block.kind in ("embedding", "head")}
    size = sum(block.stored.allocated for block in tied.values())

    def used(budget: int = WIDE, **load: Any) -> tuple[Use, Use]:
        asked = replace(FAST, **load)
        resident = [block for block in described.blocks if block.name not in tied]
        shares = Share(resident=described.blocks), Share(resident=resident, evicted=list(tied.values()))
        card, host = (use_of(described, share, asked, budget=budget) for share in shares)
        assert card.weights - host.weights == size
        return card, host

    card, host = used()
    assert host.head == card.head > 0
    assert card.decode - host.decode == pytest.approx(size, rel=0.02)
    more = used(batch=9)[1]
    assert more.head == 0
    assert more.decode - used(batch=8)[1].decode > size - host.head
    assert used(host.peak - 1)[1].peak == host.least == host.peak
    assert card.least == max(card.loading, card.prefill - card.head)


PAIR = ["model.language_model.embed_tokens", "lm_head"]
SMALL: dict[str, Any] = {"vram": "1.9GiB", "context": 2048, "card": "RTX 3060"}


def test_the_head_leaves_a_small_card_before_layers() -> None:
    if not prompt_kernels.reads_best_words((8, 6)):
        pytest.skip("this transformers does not say which words matter")
    plan = gemma4_compat.plan_device_map("E2B", **SMALL)
    (use,) = plan.use.values()
    assert [plan.device_map[name] for name in PAIR] == ["cpu", "cpu"]
    assert plan.streamed == ()
    assert use.head
    assert use.peak <= use.budget
    assert "The head and the embedding tied to it are in host memory." in _plan_text.plan_text(plan, width=100)
    assert '    "lm_head": "cpu",' in plan.code
    more = gemma4_compat.plan_device_map("E2B", **{**SMALL, "vram": "2.05GiB"})
    assert [more.device_map[name] for name in PAIR] == [0, 0]
    assert more.chosen_chunk  # which keep it there
    assert "tied to it" not in _plan_text.plan_text(more)


@pytest.mark.parametrize(
    "options",
    [{"card": None}, {"fast": False}, {"batch": 9, "context": 256}, {"cpu": "500MiB"}, {"card": "RTX 2070"}],
    ids=lambda given: " ".join(given),
)
def test_the_head_stays_where_all_of_it_would_be_read(options: dict[str, Any]) -> None:
    """Or where nobody knows that it is not; and it is not read on a disk."""
    plan = gemma4_compat.plan_device_map("E2B", **{**SMALL, **options})
    assert [plan.device_map[name] for name in PAIR] == [0, 0]


def test_more_memory_brings_the_head_back_before_towers_and_after_layers() -> None:
    described, load = planned(real_text("E2B"), None), replace(FAST, head_away=True)
    least = layout.smallest_budget(described, load)
    assert least < layout.smallest_budget(described, FAST)
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="does not fit"):
        layout.layout(described, {0: least - 1}, load)
    gone = []
    for budget in range(least, 12 << 30, 97 << 20):
        placed = layout.layout(described, {0: budget}, load)
        assert placed.use[0].peak <= budget
        pair = {placed.device_map[name] for name in ("model.embed_tokens", "lm_head")}
        assert len(pair) == 1
        gone.append((len(placed.streamed), pair == {"cpu"}, len(away(placed, "per_layer_embedding", described))))
        assert not placed.streamed or gone[-1][1:] == (True, 1)
    assert gone == sorted(gone, reverse=True)
    assert [(0, True, 1) in gone, gone[-1]] == [True, (0, False, 0)]
