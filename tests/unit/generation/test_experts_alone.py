"""Experts that see each token by itself: drafts have its bits, and what would change them is found out each time.

Batches of such texts are in test_continuous.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._gemma4.quantization import expert_storage, experts
from gemma4_compat._generation import continuous, experts_alone
from gemma4_compat._graphs import decoder, deferred_stop, fused_steps
from gemma4_compat._kernels.match import custom
from gemma4_compat._lab import tiny, tiny_models
from tests.unit.generation import calls, test_assisted
from tests.unit.generation.test_assisted import SAMPLED, ask, counted, drafting, same
from tests.unit.generation.test_continuous import decoded, kernels_by_row, with_experts
from tests.unit.kernels.by_rows import ByWidth
from tests.unit.offload.test_expert_lookup import placed

__all__ = ["kernels_by_row"]
pytestmark = pytest.mark.usefixtures("tapes")
by_row = pytest.mark.usefixtures("kernels_by_row")
DIFFERS = "experts: a token differs bitwise beside others, as "
UNPACKED = "no kernel multiplies by the experts as they are packed"
LOOKUP = {"prompt_lookup_num_tokens": 5}


@pytest.fixture
def any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of drafts, and speculative steps that are read late."""
    monkeypatch.setattr(test_assisted.draft_length, "DraftLength", test_assisted.AnyLength)
    monkeypatch.setattr(deferred_stop, "WAITING", 10.0)


@pytest.fixture(scope="module")
def assistant(workspace: Any) -> Any:
    folder = workspace.cached(tiny_models.build_moe_checkpoint)

    def assistant_with_experts(made: Path) -> None:
        tiny_models.build_assistant(folder, made, variant="26B-A4B")

    try:
        made = workspace.cached(assistant_with_experts)
        return tiny.load(made, device=workspace.main, cls=tiny_models.assistant_class(folder))
    except ImportError as error:
        pytest.skip(str(error))


def placed_at(workspace: Any, where: str) -> Any:
    """With its experts in 4 bits, on the device, or away from it."""
    model = with_experts(workspace)
    return model if where == "device" else placed(workspace, model, "experts", where)


def fast(workspace: Any, where: str = "device") -> Any:
    return gemma4_compat.decode_fast(placed_at(workspace, where), assistants=True)


@by_row
@pytest.mark.usefixtures("any_pace")
@pytest.mark.parametrize("where", ["device", pytest.param("memory", marks=pytest.mark.full)])
def test_tokens_are_those_without_drafts(
    workspace: Any, assistant: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Those of an assistant, of the text before, and many right ones."""
    model, drafts = fast(workspace, where), {"assistant_model": assistant}
    for seed, (length, options) in enumerate([(3, {}), (20, SAMPLED)]):
        given = calls.text(model, length, seed=seed)
        expected = ask(model, given, new=30, **options)
        for way in (drafts, LOOKUP) if where == "memory" else ():
            same(expected, ask(model, given, new=30, **options, **way))
        with monkeypatch.context() as patched:
            drafting(patched, expected[0], 0.8)
            same(expected, ask(model, given, new=30, **options, **drafts))
    found = counted(model)
    assert found.reasons == ()
    assert found.accepted > (5 if where == "device" else 15)


def _in_bfloat16(model: Any) -> None:
    """One layer's."""
    expert_storage.dequantize_module([*experts.all_experts(model).values()][-1])


def _exact(model: Any) -> None:
    gemma4_compat.decode_fast(model, exact=True)


def _on_experts(model: Any) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["experts.gate_up_proj", "experts.down_proj"]
    get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules=[], target_parameters=targets))


def _other_dtype(model: Any) -> None:
    model.half()


def _other_scales(model: Any) -> None:
    state = calls.layers(model)[1].experts.down_proj.quant_state
    state.offset = state.offset.half()


def _own_forward(model: Any) -> None:
    module = calls.layers(model)[0].experts
    original = module.forward
    module.forward = lambda *args: original(*args)


def _quantized_again(model: Any) -> None:
    """Other weights of the same format: nothing is in the way."""
    _in_bfloat16(model)
    expert_storage.quantize_module([*experts.all_experts(model).values()][-1], tiny.quantization_config("4bit"))


def _adapted(model: Any) -> None:
    """What an adapter adds elsewhere, each token has by itself."""
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "router.proj"]))


CHANGES: dict[str, tuple[Callable[[Any], None], str | None]] = {
    "in bfloat16": (_in_bfloat16, "the experts are not in 4 bits"),
    "exact": (_exact, "PyTorch's kernels compute it"),
    "an adapter": (_on_experts, "the experts have an adapter or something else around them"),
    "another dtype": (_other_dtype, UNPACKED),
    "other scales": (_other_scales, UNPACKED),
    "a forward": (_own_forward, "the experts have a forward of their own"),
    "quantized again": (_quantized_again, None),
    "an adapter elsewhere": (_adapted, None),
}


@by_row
@pytest.mark.usefixtures("any_pace")
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_afterwards_is_seen_by_the_next_call(workspace: Any, name: str) -> None:
    model = fast(workspace)
    given = calls.text(model, 12)
    ask(model, given, new=8, **LOOKUP)
    assert experts_alone.unsupported_reason(model) is None
    assert continuous.unsupported_reason(model) is None
    assert counted(model).reasons == ()
    change, why = CHANGES[name]
    change(model)
    reason = None if why is None else DIFFERS + why
    assert experts_alone.unsupported_reason(model) == reason
    assert bool(continuous.unsupported_reason(model)) == bool(reason)
    before = counted(model)
    same(ask(model, given, new=12), ask(model, given, new=12, **LOOKUP))
    if name != "exact":  # which is without assistants
        assert counted(model).reasons == (() if reason is None else (reason,))
    assert (counted(model).rounds == before.rounds) == (reason is not None)


@by_row
def test_an_adapter_that_is_taken_off_again(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model

    model = fast(workspace)
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=[], target_parameters=["experts.down_proj"])
    adapted = get_peft_model(model, config)
    assert (
        experts_alone.unsupported_reason(model)
        == f"{DIFFERS}the experts have an adapter or something else around them"
    )
    assert experts_alone.unsupported_reason(adapted.unload()) is None


@by_row
@pytest.mark.parametrize(("where", "seen"), [("memory", True), ("disk", False)])
def test_experts_that_are_moved_afterwards(workspace: Any, where: str, *, seen: bool) -> None:
    model = placed(workspace, fast(workspace), "experts", where)
    away = f"{DIFFERS}the experts are on disk, or in host memory that the device cannot read"
    assert experts_alone.unsupported_reason(model) == (None if seen else away)
    given = calls.text(model, 12)
    same(ask(model, given, new=8), ask(model, given, new=8, **LOOKUP))
    assert (away in counted(model).reasons) != seen


@by_row
def test_without_kernels(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast(workspace)
    monkeypatch.setattr(custom, "unsupported_reason", lambda _device: "there are no kernels here")
    assert (
        experts_alone.unsupported_reason(model) == f"{DIFFERS}no kernel multiplies by the experts as they are packed"
    )
    assert continuous.unsupported_reason(model) == "there are no kernels here"
    given = calls.text(model, 12)
    same(ask(model, given, new=8), ask(model, given, new=8, **LOOKUP))
    assert counted(model).rounds == 0


@by_row
@pytest.mark.parametrize("way", [{}, LOOKUP], ids=["single tokens", "drafts"])
def test_without_their_patch_packed_experts_compute_nothing(workspace: Any, way: dict[str, Any]) -> None:
    model = fast(workspace)
    gemma4_compat.revert("transformers-quantized-experts")
    try:
        with pytest.raises(RuntimeError):
            ask(model, calls.text(model, 12), new=2, **way)
    finally:
        gemma4_compat.install()


@by_row
@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda _: None, {"return_dict_in_generate": True}, "more is returned than tokens"),
        (lambda model: model.set_attn_implementation("eager"), {}, "attention is not sdpa"),
    ],
    ids=["more is returned", "eager attention"],
)
def test_what_speculative_steps_cannot_do_is_not_left_to_transformers(
    workspace: Any, change: Callable[[Any], Any], options: dict[str, Any], reason: str
) -> None:
    """Whose loop has upstream's experts read all drafts at once."""
    model = fast(workspace)
    change(model)
    given = calls.text(model, 12)
    found, expected = (
        getattr(one, "sequences", one)
        for one, _ in (ask(model, given, new=12, **options, **way) for way in (LOOKUP, {}))
    )
    assert torch.equal(found, expected)
    assert (counted(model).reasons, counted(model).rounds) == ((reason,), 0)


@pytest.mark.full
@pytest.mark.usefixtures("kernels_on_host", "any_pace")
@pytest.mark.parametrize(("where", "fused"), [("device", 4), ("memory", 10**6)])
def test_the_kernels_themselves(workspace: Any, monkeypatch: pytest.MonkeyPatch, where: str, fused: int) -> None:
    """Of batches and of drafts, one by one and fused, in an emulator; with an adapter beside the experts."""
    monkeypatch.setattr(fused_steps.Progress, "after", fused)
    model = placed_at(workspace, where)
    model.generation_config.eos_token_id = None
    gemma4_compat.decode_fast(model, reuse_prefix=True)
    assert continuous.unsupported_reason(model) is None
    with torch.no_grad():
        texts = decoded(model, 4, 24, [(3, 5, 0), (8, 4, 0), (12, 4, 1), (5, 3, 2), (7, 3, 4)])
    for text in texts:
        assert torch.equal(torch.stack(text.logits), text.expected.to(text.logits[-1].dtype))

    _adapted(model)
    gemma4_compat.decode_fast(model, assistants=True)
    given = calls.text(model, 5)
    expected = ask(model, given, new=50)
    before = counted(model)
    drafting(monkeypatch, expected[0], 0.8)
    same(expected, ask(model, given, new=50, **LOOKUP))
    found = counted(model)
    assert (found.reasons, bool(found.fused)) == ((), fused == 4)
    assert found.accepted > 10
    assert (found.experts_kept > before.experts_kept) == (where == "memory")
    assert not (where == "memory" and decoder.of(model).experts.is_there)


@pytest.mark.full
@pytest.mark.usefixtures("kernels_on_host", "any_pace")
def test_three_threads_share_what_stays_on_the_card(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them decodes single tokens, whose slots the drafts of the others change."""
    monkeypatch.setattr(custom, "CustomKernels", ByWidth)
    monkeypatch.setattr(fused_steps.Progress, "after", 10**6)
    model = fast(workspace, "memory")
    prompts = [calls.text(model, length, seed=length) for length in (5, 9, 14)]
    ways: list[dict[str, Any]] = [LOOKUP, {}, LOOKUP]
    expected = [ask(model, given, new=40)[0] for given in prompts]
    before, found = counted(model), {}

    def work(index: int) -> None:
        found[index] = [ask(model, prompts[index], new=40, **ways[index])[0] for _ in range(3)]

    run = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in run:
        thread.start()
    for thread in run:
        thread.join()
    assert [all(torch.equal(one, expected[index]) for one in found[index]) for index in range(3)] == [True] * 3
    assert counted(model).experts_kept > before.experts_kept
    assert counted(model).rounds > 20
    assert counted(model).reasons == ()


@pytest.mark.usefixtures("kernels_on_host")
def test_a_kernel_that_has_failed_its_try(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast(workspace)
    assert experts_alone.unsupported_reason(model) is None
    monkeypatch.setattr(custom, "multiplies_experts", lambda *_: False)
    assert experts_alone.unsupported_reason(model) == DIFFERS + UNPACKED
