"""Decoding by replay on a GPU: every answer is that of the same call with ``disable_compile=True``, bit by bit."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import _decoding
from gemma4_compat._models import placement as _placement
from gemma4_compat._reproduction import tiny
from tests.offload import threads

PATCH = "transformers-graph-decoding"
NEW = 8
QUANTIZATIONS = (None, "4bit-double", "4bit")
PLACEMENTS = ("gpu", "host", "streamed")
TABLE = "model.language_model.embed_tokens_per_layer"
#: Every quantization in every place; each of both with an adapter and without.
CELLS = [
    (quantization, (None, "language")[index % 2], where)
    for index, (quantization, where) in enumerate(itertools.product(QUANTIZATIONS, PLACEMENTS))
]
Outputs = list[Any]
#: Runs a ``generate`` or several, given further arguments for each.
Run = Callable[[dict[str, Any]], Outputs]


class Models:
    """Each model, loaded once."""

    def __init__(self, workspace: Any) -> None:
        self.workspace = workspace
        self.known: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, quantization: str | None = "4bit-double", adapter: str | None = None, where: str = "gpu"
    ) -> Any:
        key = quantization, adapter, where
        if key not in self.known:
            self.known[key] = self.fresh(*key)
        return self.known[key]

    def fresh(self, quantization: str | None = "4bit-double", adapter: str | None = None, where: str = "gpu") -> Any:
        """A model of the test's own, to change."""
        workspace = self.workspace
        model = workspace.load(quantization)
        if where != "gpu":
            placement = tiny.device_map(model, "towers", main=workspace.main, offloaded=workspace.offloaded)
            placement[TABLE] = workspace.offloaded
            if where == "streamed":
                placement |= {name: workspace.offloaded for name in placement if ".layers." in name}
            model = workspace.dispatch_map(model, placement)
        elif quantization is None:  # which transformers would compile
            gemma4_compat.decode_fast(model)
            model.generation_config.cache_implementation = None  # each call says
        return threads.adapted(workspace, model, adapter).eval()


@pytest.fixture(scope="module")
def models(workspace: Any) -> Models:
    return Models(workspace)


def steps(model: Any) -> Any:
    return dataclasses.replace(_decoding.statistics(model))


def text(model: Any, length: int = 24, *, batch: int = 1, seed: int = 7) -> dict[str, Any]:
    """Every second sequence of a batch is padded on the left."""
    import torch

    ids = torch.randint(3, 240, (batch, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    ids[1::2, : length // 3], mask[1::2, : length // 3] = 0, 0
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def generate(model: Any, batch: dict[str, Any], way: dict[str, Any], *, new: int = NEW, **options: Any) -> Any:
    import torch

    torch.manual_seed(3)
    asked = {"do_sample": False, "min_new_tokens": new, "max_new_tokens": new}
    cache = {} if "past_key_values" in options else {"cache_implementation": "static"}
    kept = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(**batch, **{**asked, **cache, **kept, **options, **way})


def compared(model: Any, run: Run, *, replays: bool = True) -> Outputs:
    """The outputs of ``run``, which are the same both ways; unless ``replays``, nothing is replayed."""
    import torch

    before = steps(model).replayed
    found = run({})
    after = steps(model).replayed
    assert (after > before) == replays, steps(model)
    expected = run({"disable_compile": True})
    assert steps(model).replayed == after
    assert len(found) == len(expected) > 0
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        assert len(one.logits) == len(other.logits) > 0
        assert all(torch.equal(*pair) for pair in zip(one.logits, other.logits))
    return found


def differ(some: Outputs, others: Outputs) -> bool:
    """Whether the answers are others: those of a stale graph would show."""
    import torch

    return not any(torch.equal(one.logits[-1], other.logits[-1]) for one, other in zip(some, others, strict=True))


def ask(model: Any, **options: Any) -> Run:
    return lambda way: [generate(model, text(model), way, **options)]


def turns(model: Any) -> Run:
    """Three turns on one cache: each goes on from all that was said."""

    def run(way: dict[str, Any]) -> Outputs:
        import torch
        from transformers import StaticCache

        cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=64)
        found: Outputs = []
        ids = text(model, 5)["input_ids"]
        for turn in range(3):
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            found.append(generate(model, batch, way, past_key_values=cache))
            ids = torch.cat([found[-1].sequences, text(model, 4, seed=turn)["input_ids"]], dim=-1)
        return found

    return run


SCENARIOS: dict[str, Callable[[Any, Models], Run]] = {
    "greedy": lambda model, _: ask(model),
    "sampled": lambda model, _: ask(model, do_sample=True, temperature=0.8, top_k=50),
    "several": lambda model, _: ask(model, do_sample=True, num_return_sequences=3),
    "beams": lambda model, _: ask(model, num_beams=3),
    "padded": lambda model, _: lambda way: [generate(model, text(model, batch=2), way)],
    "media": lambda model, models: lambda way: [generate(model, models.workspace.inputs(), way)],
    # The window has 8 tokens.
    "across the window": lambda model, _: lambda way: [generate(model, text(model, 3), way, new=12)],
    "three turns": lambda model, _: turns(model),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_the_same_answers(
    models: Models, quantization: str | None, adapter: str | None, where: str, scenario: str
) -> None:
    model = models(quantization, adapter, where)
    compared(model, SCENARIOS[scenario](model, models))


@pytest.mark.parametrize("where", PLACEMENTS)
def test_the_second_call_of_a_kind_captures_nothing(models: Models, where: str) -> None:
    model = models.fresh(where=where)
    options = {"min_new_tokens": NEW, "max_new_tokens": NEW, "cache_implementation": "static"}
    model.generate(**text(model), **options)
    before = steps(model)
    assert (before.eager, before.captured, before.replayed) == (1, 1, NEW - 2)
    for seed in (8, 9):
        model.generate(**text(model, seed=seed), **options)
    after = steps(model)
    assert (after.eager, after.captured, after.replayed) == (1, 1, 3 * (NEW - 1) - 1)
    assert after.reasons == ()


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_adapters_switched_disabled_and_merged_between_calls(models: Models, quantization: str | None) -> None:
    model = models.fresh(quantization, "language")
    model.load_adapter(models.workspace.adapter("all"), "second")
    first = compared(model, ask(model))
    model.set_adapter("second")
    second = compared(model, ask(model))
    assert differ(first, second)
    with model.disable_adapter():
        plain = compared(model, ask(model))
    assert differ(plain, first)
    assert differ(plain, second)
    model.set_adapter("default")
    assert not differ(compared(model, ask(model)), first)
    model.merge_adapter()
    compared(model, ask(model))
    model.unmerge_adapter()
    compared(model, ask(model))
    model.delete_adapter("second")
    compared(model, ask(model))


CHANGES: dict[str, Callable[[Any], None]] = {}


def change(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CHANGES[function.__name__.strip("_").replace("_", " ")] = function
    return function


@change
def _in_place(model: Any) -> None:
    layers(model)[1].input_layernorm.weight.data.mul_(-1.5)


@change
def _new_data(model: Any) -> None:
    weight = layers(model)[1].mlp.up_proj.weight
    weight.data = weight.data.flip(0).contiguous()


@change
def _new_parameter(model: Any) -> None:
    import torch

    norm = layers(model)[1].post_attention_layernorm
    norm.weight = torch.nn.Parameter(-norm.weight.detach(), requires_grad=False)


@change
def _another_module(model: Any) -> None:
    layers(model)[1].mlp, layers(model)[2].mlp = layers(model)[2].mlp, layers(model)[1].mlp


@change
def _weights_loaded(model: Any) -> None:
    norm = layers(model)[2].input_layernorm
    norm.load_state_dict({"weight": -norm.weight.data})


@change
def _another_activation(model: Any) -> None:
    import torch

    layers(model)[0].mlp.act_fn = torch.nn.ReLU().eval()


def layers(model: Any) -> Any:
    return model.model.language_model.layers


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed_before_a_replay(models: Models, what: str, quantization: str | None) -> None:
    model = models.fresh(quantization)
    before = compared(model, ask(model))
    CHANGES[what](model)
    assert differ(before, compared(model, ask(model)))


def test_a_streamed_weight_changed_on_the_host_is_read_anew(models: Models) -> None:
    model = models.fresh(where="streamed")
    before = compared(model, ask(model))
    norm = layers(model)[1].input_layernorm
    with _placement.weights_brought_in(norm):
        norm.weight.data = norm.weight.data * -1.5
    assert differ(before, compared(model, ask(model)))


def test_another_attention_is_captured_anew(models: Models) -> None:
    model = models.fresh()
    compared(model, ask(model))
    captured = steps(model).captured
    model.set_attn_implementation("eager")
    compared(model, ask(model))
    assert steps(model).captured > captured


@pytest.mark.parametrize("where", PLACEMENTS)
def test_a_hook_of_the_user_runs_for_every_token(models: Models, where: str) -> None:
    model = models.fresh(where=where)
    compared(model, ask(model))
    seen: list[int] = []
    handle = layers(model)[1].register_forward_hook(lambda _module, _given, output: seen.append(1) or -output)
    changed = compared(model, ask(model), replays=False)
    assert len(seen) == 2 * NEW
    assert any("hook" in reason for reason in steps(model).reasons)
    handle.remove()
    assert differ(changed, compared(model, ask(model)))


def test_int8_says_why_it_is_not_replayed(models: Models) -> None:
    model = models.fresh("8bit")
    compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert "8-bit" in reason


def _synchronizes(states: Any) -> None:
    float(states.sum())


def _takes_all_memory(states: Any) -> None:
    import torch

    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 50, dtype=torch.uint8, device=states.device)


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("fails", [_synchronizes, _takes_all_memory])
def test_a_capture_that_fails_leaves_everything_as_it_was(
    models: Models, where: str, fails: Callable[[Any], None]
) -> None:
    import torch

    class Activation(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, states: Any) -> Any:
            for action in actions:
                action(states)
            return self.inner(states)

    actions = [fails]
    model = models.fresh(where=where)
    mlp = layers(model)[3].mlp
    mlp.act_fn = Activation(mlp.act_fn).eval()
    failed = compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert "capture" in reason
    actions.clear()
    assert not differ(failed, ask(model)({"disable_compile": True}))
    compared(model, lambda way: [generate(model, text(model, batch=2), way)])  # another kind of step
    other = models.fresh(where=where)
    compared(other, ask(other))


@pytest.mark.parametrize("where", PLACEMENTS)
def test_two_threads_at_once(models: Models, where: str) -> None:
    """Each with a cache of its own: before transformers 5.15 the one that ``generate`` makes is the model's."""
    import torch
    from transformers import StaticCache

    model = models.fresh(where=where)
    wrong: list[int] = []

    def answer(index: int, way: dict[str, Any]) -> Any:
        cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=32)
        return generate(model, text(model, 12, seed=index), way, past_key_values=cache).sequences

    def work(index: int) -> None:
        wrong.extend(index for _ in range(4) if not torch.equal(answer(index, {}), expected[index]))

    expected = [answer(index, {"disable_compile": True}) for index in range(2)]
    assert threads.run_together([lambda: work(0), lambda: work(1)], limit=60) == [None, None]
    assert wrong == []
    assert steps(model).replayed > 0


def test_other_streams_and_inference_mode_in_between(models: Models) -> None:
    import torch

    model = models.fresh()
    compared(model, ask(model))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compared(model, ask(model))
    torch.cuda.current_stream().wait_stream(stream)
    with torch.inference_mode():
        compared(model, ask(model))
    compared(model, ask(model))


def test_without_the_patch_nothing_is_replayed(models: Models) -> None:
    model = models.fresh()
    try:
        gemma4_compat.revert(PATCH)
        compared(model, ask(model), replays=False)
    finally:
        gemma4_compat.install()
    compared(model, ask(model))


def allocated() -> int:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


@pytest.mark.parametrize("where", PLACEMENTS)
def test_nothing_is_left_of_a_deleted_model(models: Models, where: str) -> None:
    left = []
    for _ in range(2):
        model = models.fresh(adapter="language", where=where)
        for batch in (1, 2):
            generate(model, text(model, batch=batch), {})
        assert steps(model).replayed > 0
        del model
        left.append(allocated())
    assert left[1] <= left[0]


@pytest.mark.parametrize("where", PLACEMENTS)
def test_memory_is_flat_over_changing_calls(models: Models, record: Callable[[str, Any], None], where: str) -> None:
    model = models.fresh(adapter="language", where=where)
    model.load_adapter(models.workspace.adapter("all"), "second")
    held = []
    for _ in range(4):
        for name in ("default", "second"):
            model.set_adapter(name)
            for batch, length in ((1, 3), (3, 24), (2, 12)):
                generate(model, text(model, length, batch=batch), {})
        held.append(allocated())
    record(f"graph decoding, held {where}", held)
    assert held[2] == held[3] <= held[1]
    assert steps(model).replayed > 0
    assert steps(model).reasons == ()
