"""Experts of the host that stay on the card: the same tokens and logits, whatever is in the slots."""

from __future__ import annotations

import copy
import functools
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch
import transformers
from packaging.version import Version

import gemma4_compat
from benchmarks.experts import kept as benchmark
from gemma4_compat._gemma4 import host
from gemma4_compat._generation import call, expert_slots
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import decoder, deferred_stop, fused_steps
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.specs import expert_slots as copying
from gemma4_compat._lab import tiny_models
from gemma4_compat._memory import use
from tests.unit.generation import calls
from tests.unit.generation.test_best_words import Streamer
from tests.unit.kernels.host_kernels import HostMemory
from tests.unit.offload import threads
from tests.unit.offload.test_expert_lookup import loaded, placed

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"), reason="whose code runs between two tokens is not known"
)
Make = Callable[..., Any]
NUMBER, MULTIPLIES = expert_slots.number, custom.multiplies_experts
OPTIONS = {"experts_implementation": "grouped_mm"}
NEW = 12


@pytest.fixture(scope="module")
def checkpoint(workspace: Any) -> Path:
    return workspace.cached(tiny_models.build_moe_checkpoint)


@pytest.fixture
def made(workspace: Any, checkpoint: Path, kernels_on_host: None, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A function that returns a model after ``decode_fast``, with its experts on the host and so many slots; without
    slots, with everything on one device.
    """
    monkeypatch.setattr(fused_steps.Progress, "after", 10**6)
    # Products with packed experts take an emulator long; the first case below has them.
    monkeypatch.setattr(custom, "multiplies_experts", lambda *_: False)

    def make(slots: int | None, quantization: str | None = "4bit-double", *, exact: bool = False) -> Any:
        model = loaded(workspace, checkpoint, quantization, **OPTIONS)
        if slots is not None:
            monkeypatch.setattr(expert_slots, "number", lambda *_, **__: slots)
            model = placed(workspace, model, "experts", "memory")
        return gemma4_compat.decode_fast(model, exact=exact)

    return make


def said(model: Any, *, batch: int = 1, seed: int = 7, new: int = NEW, **options: Any) -> Any:
    return calls.generate(model, calls.text(model, batch=batch, seed=seed), new=new, **options)


def counted(model: Any) -> tuple[int, int]:
    found = gemma4_compat.statistics(model).decoding
    return found.experts_kept, found.experts_brought


@pytest.mark.parametrize(
    ("quantization", "slots", "batch", "fused"),
    [
        pytest.param("4bit-double", 5, 1, True, marks=pytest.mark.full),
        ("4bit-double", 2, 1, False),
        ("4bit", 8, 4, False),
        ("4bit-double", 3, 2, False),  # more experts than slots: host memory alone is read
        (None, 32, 2, True),
    ],
)
def test_the_same_answers(
    made: Make, monkeypatch: pytest.MonkeyPatch, quantization: str | None, slots: int, batch: int, *, fused: bool
) -> None:
    if fused:
        monkeypatch.setattr(fused_steps.Progress, "after", 3)
    if slots == 5:
        monkeypatch.setattr(custom, "multiplies_experts", MULTIPLIES)
    model, plain = made(slots, quantization), made(None, quantization)
    for seed in (7, 8):
        calls.assert_equal(said(model, batch=batch, seed=seed), said(plain, batch=batch, seed=seed))
    found = gemma4_compat.statistics(model).decoding
    assert (found.reasons, found.not_fused, bool(found.fused)) == ((), (), fused), found
    assert found.replayed > NEW
    kept, brought = counted(model)
    if slots < batch * 2:
        assert (kept, brought) == (0, 0)
    else:
        layers = len(calls.layers(model))
        assert kept + brought <= found.replayed * layers * batch * 2 + 2 * layers * batch * 2 * 2
        assert kept > 0
        assert brought >= layers * 2


def test_steps_that_bring_whole_layers_leave_them_the_memory(made: Make) -> None:
    """Of 32 experts, those of 15 tokens are looked up, and those of 16 are not."""
    model = made(32)
    said(model)
    decoding = decoder.of(model)
    with deferred_stop.sampling([], samples=False):
        assert expert_slots.of(decoding, model, 15) is decoding.experts
        assert decoding.experts.is_there
        assert expert_slots.of(decoding, model, 16) is None
    assert not decoding.experts.is_there


def test_bits_of_pytorch(made: Make) -> None:
    model = made(6, exact=True)
    calls.compared(model, calls.ask(model, new=NEW))
    assert min(counted(model)) > 0


def test_a_weight_that_is_written_to_is_read_anew(made: Make) -> None:
    """Through whatever: no counter of versions nor an address tells of some of these."""
    model, plain = made(32), made(None)
    before = said(model)
    for write in (_in_place, _through_data, _through_numpy):
        for one in (model, plain):
            write(_down_projection(one))
        found = said(model)
        calls.assert_equal(found, said(plain))
        assert calls.differ([before], [found])
        before = found
    assert gemma4_compat.statistics(model).decoding.captured == 1


def _down_projection(model: Any) -> Any:
    """The packed bytes of the experts of the second layer, where they are."""
    module = calls.layers(model)[1].experts
    hook = vars(module).get("_hf_hook")
    return module.down_proj.data if hook is None else hook.weights_map["down_proj"]


def _in_place(weight: Any) -> None:
    weight.bitwise_xor_(0x11)


def _through_data(weight: Any) -> None:
    weight.data.copy_(weight.data.flip(0))


def _through_numpy(weight: Any) -> None:
    numbers = weight.numpy()
    numbers ^= 0x22


def test_a_weight_that_is_replaced(made: Make) -> None:
    model, plain = made(32), made(None)
    said(model)
    weights = vars(calls.layers(model)[1].experts)["_hf_hook"].weights_map
    new = weights["down_proj"].flip(0)
    weights.dataset.state_dict[f"{weights.prefix}down_proj"] = new
    parameter = calls.layers(plain)[1].experts.down_proj
    parameter.data = parameter.data.flip(0).contiguous()
    for _ in range(2):
        calls.assert_equal(said(model), said(plain))
    kept = counted(model)[0]
    said(model)
    assert counted(model)[0] > kept


def test_an_adapter_on_the_experts(made: Make) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=[], target_parameters=targets)
    model, plain = made(6), made(None)
    said(model)
    model, plain = (get_peft_model(one, copy.deepcopy(config)).eval() for one in (model, plain))
    set_peft_model_state_dict(model, get_peft_model_state_dict(plain))
    adapted = said(model)
    calls.assert_equal(adapted, said(plain))
    before = counted(calls.base(model))
    with model.disable_adapter(), plain.disable_adapter():
        found = said(model)
        calls.assert_equal(found, said(plain))
    assert calls.differ([adapted], [found])
    calls.assert_equal(said(model), adapted)
    assert counted(calls.base(model))[0] > before[0]


def test_code_of_the_users_between_two_tokens(made: Make) -> None:
    """It may write to weights: nothing stays of them."""
    model, plain = made(32), made(None)

    class Writes(Streamer):
        def __init__(self, model: Any) -> None:
            self.model = model

        def put(self, value: Any) -> None:
            _in_place(_down_projection(self.model))

    calls.assert_equal(said(model, streamer=Writes(model)), said(plain, streamer=Writes(plain)))
    assert counted(model) == (0, 0)
    calls.assert_equal(said(model), said(plain))
    assert min(counted(model)) > 0


def test_two_models(made: Make) -> None:
    model, other, plain = made(4), made(6), made(None)
    _in_place(_down_projection(other))
    mine, theirs = said(model), said(other)
    calls.assert_equal(said(model), mine)
    calls.assert_equal(said(other), theirs)
    calls.assert_equal(mine, said(plain))
    assert calls.differ([mine], [theirs])


def test_copies_and_undo(made: Make) -> None:
    model = made(6)
    expected = said(model)
    decoding, before = decoder.of(model), counted(model)
    assert decoding.experts is not None
    copied = copy.deepcopy(model)
    assert decoder.of(copied).experts is None
    assert pickle.loads(pickle.dumps(decoding)) is None
    gemma4_compat.decode_fast(model, enabled=False)
    assert decoding.experts is None
    model.generate(**calls.text(model), max_new_tokens=NEW, cache_implementation="static")
    assert counted(model) == before
    gemma4_compat.decode_fast(model)
    calls.assert_equal(said(model), expected)
    assert decoding.experts is not None


def test_the_memory_is_there_while_a_text_is_decoded(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken, again = made(6), [], HostMemory.take
    monkeypatch.setattr(HostMemory, "take", lambda self: taken.append(self.is_there) or again(self))
    expected = said(model)
    decoding = decoder.of(model)
    assert not decoding.experts.is_there
    assert taken[0] is False
    captured, number = counted_graphs(model), len(taken)
    calls.assert_equal(said(model), expected)
    assert taken[number:] == [False]
    assert counted_graphs(model) == captured
    assert decoding.experts.take()
    model(**calls.text(model))  # outside a text, nobody gives it back
    assert decoding.experts.is_there
    with pytest.raises(RuntimeError, match="no text"):
        said(model, stopping_criteria=None, logits_processor=None, prefix_allowed_tokens_fn=_fails)
    assert not decoding.experts.is_there


def _fails(*_: Any) -> Any:
    raise RuntimeError("no text")


def counted_graphs(model: Any) -> int:
    captured: int = gemma4_compat.statistics(model).decoding.captured
    return captured


def test_a_prompt_of_another_thread_takes_the_memory(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any step: it comes back for the next one, empty; if it cannot, host memory is read."""
    model, plain = made(6), made(None)
    expected, exclusively, turns = said(plain), call.Decoder.exclusively, [0]

    def after_a_prompt(self: Any, function: Any) -> Any:
        turns[0] += 1
        if turns[0] % 5 == 0:
            decoder.of(model).give_back_experts()
        return exclusively(self, function)

    monkeypatch.setattr(call.Decoder, "exclusively", after_a_prompt)
    for _ in range(3):
        calls.assert_equal(said(model), expected)
    before = counted(model)
    assert min(before) > 0
    take, once, turns[0] = HostMemory.take, [True], 0
    monkeypatch.setattr(HostMemory, "take", lambda self: bool(once) and once.pop() and take(self))
    calls.assert_equal(said(model), expected)
    assert sum(before) < sum(counted(model)) < sum(before) * 4 // 3


def test_another_text_has_others_made(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps: the first text goes on without, and no graph has addresses of what is gone."""
    model, plain = made(6), made(None)
    expected, exclusively, turns = said(plain), call.Decoder.exclusively, [0]

    def after_another_text(self: Any, function: Any) -> Any:
        turns[0] += 1
        if turns[0] == 7:
            decoder.of(model).drop_experts()
            calls.assert_equal(said(model, seed=8), said(plain, seed=8))
        return exclusively(self, function)

    said(model)
    monkeypatch.setattr(call.Decoder, "exclusively", after_another_text)
    first = decoder.of(model).experts
    calls.assert_equal(said(model), expected)
    assert turns[0] > 14
    assert decoder.of(model).experts.key > first.key
    assert not first.is_there
    for _ in range(2):
        calls.assert_equal(said(model), expected)
    assert gemma4_compat.statistics(model).decoding.reasons == ()


def sizes(model: Any) -> tuple[int, int]:
    """Bytes of one slot of all layers, and what is left free beside slots."""
    one = sum(expert_slots._size(lookup, 32) for lookup in decoder.of(model).experts.layers) // 32
    text = model.config.get_text_config()
    return one, use.SPARE + 2 * 3 * text.top_k_experts * text.moe_intermediate_size * text.hidden_size * 2  # of a step


def test_as_many_as_there_is_room_for(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three quarters of what is free, less what leaves half a GiB; PyTorch's limit counts."""
    model, free, limit = made(6), [0], [1.0]
    expected = said(model)
    one, spare = sizes(model)
    decoder.of(model).clear()
    monkeypatch.setattr(expert_slots, "number", NUMBER)
    monkeypatch.setattr(host, "free_memory", lambda *_: free[0])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: limit[0], raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: (1 << 39) - spare - 9 * one)
    for left, share, found in (
        (spare + 12 * one, 1.0, 12),
        (spare + 11 * one, 1.0, 12),  # a little less is no reason for other graphs
        (spare + 40 * one, 1.0, 12),  # nor is more
        (spare + 4 * one, 1.0, 4),
        (spare + one, 1.0, 0),
        (spare + 40 * one, 0.5, 9),
        (8 * spare, 1.0, 9),
    ):
        free[0], limit[0] = left, share
        calls.assert_equal(said(model), expected)
        experts = decoder.of(model).experts
        assert (0 if experts is None else experts.number) == found
    decoder.of(model).clear()
    said(model)
    assert decoder.of(model).experts.number == 32


def test_memory_that_pytorch_cannot_give_back(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has in parts and does not use is free for tensors only: fewer slots, not none."""
    model = made(6)
    expected = said(model)
    one, spare = sizes(model)
    decoder.of(model).clear()
    monkeypatch.setattr(expert_slots, "number", NUMBER)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    parts, free = 20 * one, spare + 5 * one
    monkeypatch.setattr(host, "free_memory", lambda _device, kept=0: free + max(parts - kept, 0))
    monkeypatch.setattr(HostMemory, "size", 6 * one)
    before = counted(model)
    calls.assert_equal(said(model), expected)
    assert decoder.of(model).experts.number == 5
    assert counted(model) != before
    free = spare
    decoder.of(model).clear()
    monkeypatch.setattr(HostMemory, "size", one)
    calls.assert_equal(said(model), expected)
    assert decoder.of(model).experts is None


def test_more_slots_where_steps_are_captured_anyway(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that needs a longer cache has the graphs of the last one dropped; slots cost none then."""
    model, longer = made(6), 4 * NEW
    expected, expected_longer = said(model), said(made(None), new=longer)
    one, spare = sizes(model)
    decoder.of(model).clear()
    monkeypatch.setattr(expert_slots, "number", NUMBER)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    parts = 20 * one
    monkeypatch.setattr(host, "free_memory", lambda _device, kept=0: spare + 5 * one + max(parts - kept, 0))
    monkeypatch.setattr(HostMemory, "size", 6 * one)
    calls.assert_equal(said(model), expected)
    assert decoder.of(model).experts.number == 5
    monkeypatch.setattr(HostMemory, "size", 26 * one)  # the parts are one again
    captured = gemma4_compat.statistics(model).decoding.captured
    calls.assert_equal(said(model), expected)
    assert decoder.of(model).experts.number == 5  # the graph stays
    assert gemma4_compat.statistics(model).decoding.captured == captured
    calls.assert_equal(said(model, new=longer), expected_longer)
    assert decoder.of(model).experts.number == 25
    captured = gemma4_compat.statistics(model).decoding.captured
    calls.assert_equal(said(model, new=longer), expected_longer)
    assert gemma4_compat.statistics(model).decoding.captured == captured


@pytest.mark.parametrize(("given_back", "slots"), [(13, 12), (6, 5)], ids=["given back", "kept"])
def test_memory_that_pytorch_has_cached_meanwhile(
    made: Make, monkeypatch: pytest.MonkeyPatch, given_back: int, slots: int
) -> None:
    """A prompt needed it, and nothing does any more. What PyTorch cannot give back leaves fewer slots from then on."""
    model, asked = made(6), list[Any]()
    expected = said(model)
    one, spare = sizes(model)
    decoder.of(model).clear()
    monkeypatch.setattr(expert_slots, "number", NUMBER)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    free, cached = spare + 12 * one, 0
    monkeypatch.setattr(host, "free_memory", lambda _device, kept=0: free - cached + max(cached - kept, 0))

    def give_back(device: Any) -> None:
        asked.append(device)
        monkeypatch.setattr(HostMemory, "size", given_back * one)

    monkeypatch.setattr(host, "give_back_unused", give_back)
    calls.assert_equal(said(model), expected)
    assert decoder.of(model).experts.number == 12
    assert asked == []
    cached, taken, take = 7 * one, list[bool](), HostMemory.take
    monkeypatch.setattr(HostMemory, "size", 6 * one)
    monkeypatch.setattr(HostMemory, "take", lambda self: taken.append(take(self)) or taken[-1])
    calls.assert_equal(said(model), expected)
    assert len(asked) == 1
    assert decoder.of(model).experts.number == slots
    assert taken[0] is False
    assert taken[-1] is True


def test_a_prompt_whose_graph_would_take_their_memory_has_none(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = made(6), gemma4_compat.statistics
    expected = said(model)
    monkeypatch.setattr(prompts, "activations", lambda *_, **__: 1000)
    for short, replays in ((1, False), (0, True)):
        left = 2000 + decoder.of(model).experts.nbytes - short
        monkeypatch.setattr(host, "free_memory", lambda *_, left=left: left)
        for _ in range(3):
            calls.assert_equal(said(model), expected)
        assert bool(counts(model).decoding.prompts_replayed) == replays
        assert decoder.of(model).experts.number == 6


def test_memory_is_short(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(6)
    expected = said(model)
    monkeypatch.setattr(HostMemory, "size", 0)
    before = counted(model)
    calls.assert_equal(said(model), expected)
    assert counted(model) == before


def test_a_driver_that_cannot(made: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> bool:
        raise RuntimeError("CUDA's driver: cuMemCreate: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(HostMemory, "take", refuse)
    caplog.set_level("INFO", "gemma4_compat")
    model = made(6)
    for _ in range(2):
        calls.assert_equal(said(model), said(made(None)))
    assert counted(model) == (0, 0)
    assert sum("no experts stay on the card: CUDA's driver" in text for text in caplog.messages) == 1


def test_two_threads(made: Make) -> None:
    model = made(6)
    expected = [said(model, seed=seed) for seed in range(2)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(3):
            found = said(model, seed=seed, past_key_values=calls.static_cache(model, 48))
            if not torch.equal(found.sequences, expected[seed].sequences):
                wrong.append(seed)

    raised = threads.run_together([functools.partial(work, seed) for seed in range(2)], limit=100)
    assert (raised, wrong) == ([None, None], [])
    assert gemma4_compat.statistics(model).decoding.reasons == ()


def test_a_throttled_bus(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """``benchmarks/experts/kept.py --bus``: fewer threads bring experts, the answers are the same."""
    model, kernels, launched = made(6), copying.kernels, list[Any]()

    def noted(*args: Any) -> Any:
        found = kernels(*args)
        launched.append(found[0][1])
        return found

    expected = said(model)
    monkeypatch.setattr(copying, "kernels", noted)
    monkeypatch.setattr(benchmark, "_BLOCKS", range(1, 4))
    monkeypatch.setattr(benchmark, "fastest", lambda *_: 2)
    tokens = benchmark.trace(0.5, 1, 32, 2, 6)[0][:5]
    monkeypatch.setattr(expert_slots, "number", lambda *_, **__: 9)
    with benchmark.throttled(model, 1.5, tokens) as bus:
        assert (bus["blocks"], len(bus["gib_s_by_blocks"])) == (2, 3)
        assert bus["bus_gib_s"] == bus["gib_s_by_blocks"][1] > 0
        launched.clear()
        calls.assert_equal(said(model), expected)
        assert {(one.block, one.blocks[0]) for one in launched} == {(8, 2)}
        assert decoder.of(model).experts.number == 6
    with benchmark.throttled(model, None, tokens) as bus:
        assert bus == {}


def test_the_fastest_copy_that_is_slow_enough() -> None:
    speeds = {1: 3.0, 2: 6.1, 3: 12.0, 4: 11.9, 5: 14.0}
    assert [benchmark.fastest(speeds, most) for most in (12, 11.95, 3, 100)] == [3, 4, 1, 5]
    with pytest.raises(SystemExit, match=r"--bus 2: experts come at 3.00 GiB/s at least"):
        benchmark.fastest(speeds, 2)


def test_a_trace_is_what_slots_find() -> None:
    """As many experts of its tokens are in slots as the rate says, and a token names none twice."""
    slots, tokens = 31, benchmark.trace(0.67, 1, 128, 8, 31)[0]
    recent, found = list[int](), 0
    for token in tokens:
        assert len(set(token)) == 8
        found += len({*token} & {*recent[-slots:]})
        recent = [one for one in recent if one not in token] + token
    assert found / (8 * len(tokens)) == pytest.approx(0.67, abs=0.05)
