"""``reuse_prefix``: what a conversation reads, and that its answers are those of the same prompts read whole."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import weakref
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

import gemma4_compat
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.models import variants
from gemma4_compat._generation.prefix_cache import session
from gemma4_compat._lab import tiny, tiny_models
from tests.unit.generation.calls import text as batch_of
from tests.unit.offload import threads
from tests.unit.prefix_cache import chats
from tests.unit.prefix_cache.chats import NEW, ask, counted, near, reused, text

VARIANTS = ("E2B", "31B", variants.UNIFIED)
CACHES: dict[str, dict[str, Any]] = {
    "default": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 6},
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    chats.small(monkeypatch)


@pytest.fixture(scope="module")
def load(workspace: Any) -> Any:
    """A model in float32 of the test's own."""

    def loaded(variant: str = "E2B", quantization: str | None = None) -> Any:
        if variant == variants.UNIFIED:
            pytest.importorskip("transformers.models.gemma4_unified")
            folder = workspace.cached(tiny_models.build_checkpoint, variant=variant)
        else:
            folder = workspace.cached(tiny_models.build_checkpoint, text_variant=variant)
        return tiny.load(folder, quantization, device=workspace.main).float()

    return loaded


@pytest.fixture(scope="module")
def plain(load: Any) -> Any:
    """A model without ``reuse_prefix``, of each variant."""
    known: dict[str, Any] = {}

    def found(variant: str = "E2B") -> Any:
        if variant not in known:
            known[variant] = load(variant)
        return known[variant]

    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_ten_turns_read_only_what_is_new(load: Any, plain: Any, variant: str, options: dict[str, Any]) -> None:
    import torch

    model, ids = chats.reusing(load(variant)), text(20, 0)
    for turn in range(10):
        found, held = reused(model, ids, **options)
        if turn in (1, 9):
            near(found, ask(plain(variant), ids))
        # The last token of an answer was never read.
        assert held == (0 if turn == 0 else ids.shape[1] - 7), gemma4_compat.statistics(model).decoding.not_reused
        ids = torch.cat([found.sequences.cpu(), text(6, turn + 1)], dim=-1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("options", "slack"), list(zip(CACHES.values(), (0, 2, 64))), ids=CACHES)
def test_histories_that_are_edited(
    load: Any, plain: Any, monkeypatch: pytest.MonkeyPatch, variant: str, slack: int, options: dict[str, Any]
) -> None:
    chats.small(monkeypatch, slack)
    model = chats.reusing(load(variant))
    for seed in range(2):
        draw = random.Random(seed)
        ids = text(draw.randrange(2, 30), seed)
        for _ in range(8):
            found = ask(model, ids, **options)
            near(found, ask(plain(variant), ids))
            ids = chats.edited(found.sequences.cpu(), ids.shape[1], draw)
    read, held = counted(model)
    assert held > read


def test_every_sliding_layer_has_the_rows_that_a_cut_needs(load: Any, plain: Any) -> None:
    """A forward that ran out of memory may have noted more rows of its first layers than of the others."""
    model, ids = chats.reusing(load()), text(30, 0)
    ask(model, ids)
    kept = session.of(model)
    assert kept is not None
    last = kept.take()
    assert last is not None
    first = min(last.copies[-1])
    last.copies = [{first: layers[first]} for layers in last.copies]
    kept.put(last)
    found, held = reused(model, ids)  # ends before the answer, so that sliding layers have to be cut
    assert not held
    near(found, ask(plain(), ids))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_images_and_sounds_are_read_once(
    load: Any, plain: Any, variant: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor gives those of the whole conversation in every turn."""
    import torch

    if "prefill_chunk_size" in options:
        options = {"prefill_chunk_size": 64}  # sounds, and before transformers 5.23 images, are read in one chunk
    model = chats.reusing(load(variant))
    towers: list[int] = []
    for name in ("vision_tower", "audio_tower", "vision_embedder", "embed_audio"):
        if hasattr(model.model, name):
            getattr(model.model, name).register_forward_pre_hook(lambda *_: towers.append(1))
    batch = tiny.inputs(model.device, variant=variant if variant == variants.UNIFIED else None)
    for turn in range(4):
        before = counted(model)[1]
        near(ask_batch(model, batch, **options), expected := ask_batch(plain(variant), batch))
        # All but the last token of the answer before, which was never read, and the five after it.
        assert counted(model)[1] - before == (batch["input_ids"].shape[1] - 6 if turn else 0)
        assert bool(towers) == (turn == 0)
        towers.clear()
        batch = longer(batch, expected.sequences, text(5, turn).to(model.device))
    other = dict(batch, pixel_values=batch["pixel_values"].flip(1))
    before = counted(model)[1]
    near(ask_batch(model, other, **options), ask_batch(plain(variant), other))
    assert towers, "another image"
    assert counted(model)[1] == before
    twice = twofold(batch)
    near(ask_batch(model, batch, **options), ask_batch(plain(variant), batch))
    assert counted(model)[1] == before
    towers.clear()
    near(ask_batch(model, twice, **options), ask_batch(plain(variant), twice))
    assert towers, "a second image, at the end"
    assert counted(model)[1] - before == batch["input_ids"].shape[1]
    assert torch.equal(batch["input_ids"], twice["input_ids"][:, : batch["input_ids"].shape[1]])


def ask_batch(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    others = {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}
    return ask(model, batch["input_ids"], **others, **options)


def longer(batch: dict[str, Any], sequences: Any, more: Any) -> dict[str, Any]:
    import torch

    ids = torch.cat([sequences, more], dim=-1)
    added = ids.shape[1] - batch["mm_token_type_ids"].shape[1]
    kinds = torch.nn.functional.pad(batch["mm_token_type_ids"], (0, added))
    return batch | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}


def twofold(batch: dict[str, Any]) -> dict[str, Any]:
    """With the first tokens, which have the image and the sound, at the end once more; other ones."""
    import torch

    found = dict(batch)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        found[name] = torch.cat([batch[name], batch[name][:, :24]], dim=-1)
    for name in ("pixel_values", "input_features"):
        if name in batch:
            found[name] = torch.cat([batch[name], batch[name].flip(1)])
    for name in ("image_position_ids", "input_features_mask"):
        if name in batch:
            found[name] = torch.cat([batch[name], batch[name]])
    return found


CHANGES: dict[str, Any] = {
    "a weight in place": lambda model: model.get_decoder().layers[1].mlp.up_proj.weight.mul_(-1.5),
    "another tensor": lambda model: setattr(
        norm := model.get_decoder().layers[1].input_layernorm, "weight", type(norm.weight)(-norm.weight.detach())
    ),
    "new data": lambda model: setattr(
        weight := model.get_decoder().layers[0].mlp.up_proj.weight, "data", weight.data.flip(0).contiguous()
    ),
    "a hook": lambda model: model.get_decoder().layers[0].register_forward_hook(lambda _module, _in, out: out * 1.5),
    "a state dict": lambda model: (
        model.get_decoder()
        .layers[2]
        .input_layernorm.load_state_dict({"weight": -model.get_decoder().layers[2].input_layernorm.weight.detach()})
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_reads_again(load: Any, change: Any) -> None:
    import torch

    model, other = chats.reusing(load()), load()
    ids = ask(model, text(20, 0)).sequences.cpu()
    with torch.no_grad():
        change(model)
        change(other)
    found, held = reused(model, ids)
    assert held == 0
    assert gemma4_compat.statistics(model).decoding.not_reused == {
        "weights, adapters, hooks or settings of torch changed": 1
    }
    expected = ask(other, ids)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(*pair) for pair in zip(found.logits, expected.logits, strict=True))
    assert reused(model, found.sequences.cpu())[1] > 0


def test_adapters_have_conversations_of_their_own(workspace: Any, load: Any) -> None:
    """The cache of one adapter does not serve another, nor the base."""
    import torch

    model = chats.reusing(threads.adapted(workspace, workspace.load().float(), "language").eval())
    model.load_adapter(workspace.adapter("language"), "second")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "second" in name:
                weight.mul_(-2)
    ids = ask(model, text(20, 0)).sequences.cpu()
    assert reused(model, ids)[1] > 0

    def hot_swapped() -> None:
        for name, weight in model.named_parameters():
            if "lora_B.default" in name:
                weight.data.mul_(-2)

    def trained() -> None:
        for name, weight in model.named_parameters():
            if "lora_B.default" in name:
                weight.add_(0.1)

    for switch in (
        lambda: model.set_adapter("second"),
        lambda: model.set_adapter("default"),
        hot_swapped,
        lambda: torch.no_grad()(trained)(),
        lambda: model.base_model.merge_adapter(),
        lambda: model.base_model.unmerge_adapter(),
        lambda: model.base_model.disable_adapter_layers(),
        lambda: model.base_model.enable_adapter_layers(),
    ):
        switch()
        found, held = reused(model, ids)
        assert held == 0
        gemma4_compat.decode_fast(model, enabled=False)
        expected = ask(model, ids)
        chats.reusing(model)
        ask(model, ids)
        assert all(torch.equal(*pair) for pair in zip(found.logits, expected.logits, strict=True))
        assert reused(model, ids)[1] == ids.shape[1] - 1
    with model.disable_adapter():
        assert reused(model, ids)[1] == 0
    for names in (["second"], ["default"]):
        assert reused(model, ids, adapter_names=names)[1] == 0
    assert reused(model, ids)[1] == 0


AS_BEFORE: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "hidden states": {"output_hidden_states": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 2, "eos_token_id": 1},
    "positions": {"position_ids": None},
    "all logits": {"logits_to_keep": 0},
}


@pytest.mark.parametrize("options", AS_BEFORE.values(), ids=AS_BEFORE)
def test_other_calls_read_as_before_and_leave_the_conversation(load: Any, plain: Any, options: dict[str, Any]) -> None:
    import torch

    model = chats.reusing(load())
    ids = ask(model, text(20, 0)).sequences.cpu()
    if "position_ids" in options:
        options = {"position_ids": torch.arange(ids.shape[1])[None].to(model.device)}
    read = counted(model)
    torch.manual_seed(0)
    found = ask(model, ids, **options)
    torch.manual_seed(0)
    expected = ask(plain(), ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(*pair) for pair in zip(found.logits, expected.logits, strict=True))
    assert counted(model) == read
    assert sum(gemma4_compat.statistics(model).decoding.not_reused.values()) == 1
    assert reused(model, ids)[1] == ids.shape[1] - 1


def test_batches_and_padding_read_as_before(load: Any, plain: Any) -> None:
    import torch

    model = chats.reusing(load())
    ids = ask(model, text(20, 0)).sequences.cpu()
    for batch in (batch_of(model, 12, batch=2), {name: row[1:] for name, row in batch_of(model, 12, batch=2).items()}):
        assert torch.equal(*(one.generate(**batch, max_new_tokens=4, do_sample=False) for one in (model, plain())))
    padded = torch.nn.functional.pad(text(9, 1), (3, 0)).to(model.device)  # without a mask: transformers makes it
    assert torch.equal(*(one.generate(padded, max_new_tokens=4, do_sample=False) for one in (model, plain())))
    assert gemma4_compat.statistics(model).decoding.not_reused == {"several prompts at once": 1, "padding": 2}
    assert reused(model, ids)[1] == ids.shape[1] - 1


def test_a_cache_of_the_callers_stays_the_callers(load: Any, plain: Any) -> None:
    """Passed in, or returned: the caller may use it, and this package does not write to it."""
    import torch

    model = chats.reusing(load())
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(text(20, 0).to(model.device), **options)
    own = first.past_key_values
    kept = [layer.keys.clone() for layer in own.layers if getattr(layer, "keys", None) is not None]
    ids = torch.cat([first.sequences.cpu(), text(4, 1)], dim=-1)
    found, held = reused(model, ids)
    assert held == 24
    now = [layer.keys for layer in own.layers if getattr(layer, "keys", None) is not None]
    assert all(torch.equal(*pair) for pair in zip(kept, now, strict=True))
    mine = torch.cat([first.sequences, text(3, 2).to(model.device)], dim=-1)
    going_on = model.generate(mine, past_key_values=own, **options)
    assert torch.equal(going_on.sequences, ask(plain(), mine.cpu()).sequences)
    assert reused(model, found.sequences.cpu())[1] == found.sequences.shape[1] - 1
    static = model.generate(ids.to(model.device), cache_implementation="static", disable_compile=True, **options)
    assert reused(model, static.sequences.cpu())[1] == 0, "a static one is written in place, so it is not kept"


CACHE_WRITES: dict[str, Any] = {
    "in place": lambda layer: layer.keys.mul_(3),
    ".data": lambda layer: layer.values.data.neg_(),
    "a row": lambda layer: layer.keys.data[..., 4, :].zero_(),
}


@pytest.mark.parametrize("write", CACHE_WRITES.values(), ids=CACHE_WRITES)
def test_what_is_written_to_a_returned_cache_is_not_reused(load: Any, plain: Any, write: Any) -> None:
    import torch

    model = chats.reusing(load())
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(text(20, 0).to(model.device), **options)
    with torch.no_grad():
        write([one for one in first.past_key_values.layers if getattr(one, "keys", None) is not None][-1])
    ids = torch.cat([first.sequences.cpu(), text(4, 1)], dim=-1)
    found, held = reused(model, ids)
    assert held == 0
    near(found, ask(plain(), ids))
    assert gemma4_compat.statistics(model).decoding.not_reused == {
        "the cache that was returned has been written to": 1
    }
    assert reused(model, ids)[1] > 0


@pytest.mark.parametrize("whose", ["the prompt", "the answer"])
def test_tokens_that_are_written_to_are_other_tokens(load: Any, plain: Any, whose: str) -> None:
    """On the CPU, what is kept must not be the caller's own memory."""
    import torch

    model = chats.reusing(load())
    prompt = text(20, 0).to(model.device)
    said = model.generate(prompt, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    ids = prompt if whose == "the prompt" else said
    ids[0, 3] = 77
    found = ask(model, ids)
    near(found, ask(plain(), ids))
    assert counted(model)[1] <= 3
    assert torch.equal(found.sequences[0, :20], ids[0, :20])


def test_an_interrupted_answer_is_forgotten(load: Any, plain: Any) -> None:
    class Stops:
        def put(self, _tokens: Any) -> None:
            raise KeyboardInterrupt

    model = chats.reusing(load())
    ids = ask(model, text(20, 0)).sequences.cpu()
    with pytest.raises(KeyboardInterrupt):
        ask(model, ids, streamer=Stops())
    found, held = reused(model, ids)
    assert held == 0
    near(found, ask(plain(), ids))


@pytest.mark.parametrize("call", ["the first", "a later"])
def test_weights_that_change_while_an_answer_is_written(load: Any, call: str) -> None:
    """The prompt was read with the old ones."""

    class Changes:
        def put(self, _tokens: Any) -> None:
            weight = model.get_decoder().layers[1].mlp.up_proj.weight
            weight.data.mul_(-1.5)

        def end(self) -> None:
            pass

    model = chats.reusing(load())
    ids = text(20, 0) if call == "the first" else ask(model, text(20, 0)).sequences.cpu()
    ids = ask(model, ids, streamer=Changes()).sequences.cpu()
    assert reused(model, ids)[1] == 0
    assert reused(model, ids)[1] > 0


def test_a_call_within_a_call(load: Any, plain: Any) -> None:
    """A callback that asks the same model: with prompts that have nothing to do with the conversation."""
    import torch

    model, inner = chats.reusing(load()), []

    class Asks:
        def put(self, _tokens: Any) -> None:
            if not inner:
                inner.append(None)
                batch = batch_of(model, 12, batch=2)
                inner[:] = [model.generate(**batch, max_new_tokens=4, do_sample=False), ask(model, text(20, 9))]

        def end(self) -> None:
            pass

    ids = ask(model, text(20, 0)).sequences.cpu()
    found = ask(model, ids, streamer=Asks())
    near(found, ask(plain(), ids))
    batch = batch_of(model, 12, batch=2)
    assert torch.equal(inner[0], plain().generate(**batch, max_new_tokens=4, do_sample=False))
    near(inner[1], ask(plain(), text(20, 9)))
    assert reused(model, found.sequences.cpu())[1] == ids.shape[1] + NEW - 1


def test_inference_mode_is_another_conversation(load: Any) -> None:
    import torch

    model = chats.reusing(load())
    for cache in ("dynamic", "static"):
        options = {"cache_implementation": cache, "disable_compile": True}
        with torch.inference_mode():
            ids = ask(model, text(20, 0), **options).sequences.cpu()
        assert reused(model, ids, **options)[1] == 0
        assert reused(model, ids, **options)[1] > 0


def test_two_threads_at_once(load: Any, plain: Any) -> None:
    """One of them has the conversation; the other reads its prompt whole."""
    model, found, barrier = chats.reusing(load()), {}, threading.Barrier(2)

    def talk(seed: int) -> None:
        import torch

        ids = text(20, seed)
        for turn in range(4):
            barrier.wait()
            found[seed, turn] = ids, ask(model, ids)
            ids = torch.cat([found[seed, turn][1].sequences.cpu(), text(4, seed + turn)], dim=-1)

    running = [threading.Thread(target=talk, args=(seed,)) for seed in (0, 50)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert len(found) == 8
    for ids, answer in found.values():
        near(answer, ask(plain(), ids))


def test_undoing_releases_the_conversation(load: Any) -> None:
    model = load()
    before = set(vars(model))
    chats.reusing(model)
    ask(model, text(20, 0))
    last = vars(model)[attached.TURNS]._last
    rows = weakref.ref(last._rows[0].keys)
    del last
    assert rows() is not None
    gemma4_compat.decode_fast(model, enabled=False)
    assert rows() is None
    assert set(vars(model)) - before <= {attached.DECODING}


def test_a_copy_is_not_marked(load: Any) -> None:
    model = chats.reusing(load())
    ids = ask(model, text(20, 0)).sequences.cpu()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        read = counted(model)
        ask(other, ids)
        assert counted(model) == read
    assert reused(model, ids)[1] > 0


def test_without_the_patch_it_does_nothing(load: Any, plain: Any) -> None:
    model = chats.reusing(load())
    ids = ask(model, text(20, 0)).sequences.cpu()
    gemma4_compat.revert("transformers-reuse-prefix")
    try:
        read = counted(model)
        near(ask(model, ids), ask(plain(), ids))
        assert counted(model) == read
    finally:
        gemma4_compat.install()


def test_another_model_is_one_clear_error() -> None:
    import torch

    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"requires a Gemma 4 model with generate.*got Linear"):
        chats.reusing(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("store", threads.STORES)
def test_offloaded_models(workspace: Any, store: str) -> None:
    import torch

    model = chats.reusing(threads.split(workspace, store, "4bit-double", "language").eval())
    plain, ids = threads.split(workspace, store, "4bit-double", "language").eval(), text(20, 0)
    for turn in range(3):
        found, held = reused(model, ids)
        assert held == (0 if turn == 0 else ids.shape[1] - 4)
        torch.testing.assert_close(found.logits[0], ask(plain, ids).logits[0], rtol=0.1, atol=0.3)
        ids = torch.cat([found.sequences.cpu(), text(3, turn + 1)], dim=-1)
