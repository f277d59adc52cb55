"""transformers-unread-chunks: KV-shared layers and chunks of a prompt that are not the last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat._lab import tiny
from gemma4_compat._lab.stand_ins import tape
from gemma4_compat._lab.workspace import Workspace
from gemma4_compat.patches.generation import transformers_unread_chunks
from gemma4_compat.patches.generation.transformers_unread_chunks import PATCH
from tests.helpers import pairwise
from tests.patches.generation.shared_layers import OPTIONS, assert_same, computed, media, prompt
from tests.patches.promise import Promise

STEPS = OPTIONS["max_new_tokens"] - 1  # after the prompt, of one position
READS_MEDIA_IN_CHUNKS = versions.admits(">=5.23", versions.current("transformers") or "")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"KV-shared layers run \d+ times for a prompt in \d+ chunks"


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``generate`` as it is without the patch."""

    def generate(model: Any, **options: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(transformers_unread_chunks, "_may_read_more", lambda *_: True)
            return model.generate(**options)

    return generate


def compare(every_layer: Callable[..., Any], model: Any, chunks: int, **options: Any) -> Any:
    """The same bits as with every layer, which run for one chunk of these; returns the output."""
    with computed(model) as rows:
        expected = every_layer(model, **options)
        assert len(rows) == chunks + STEPS
        rows.clear()
        found = model.generate(**options)
    assert len(rows) == 1 + STEPS
    assert_same(expected, found)
    return found


@pytest.mark.parametrize(
    ("kind", "size", "cache", "dtype"),
    pairwise(
        ["one", "batch", "left", "right"],
        [1, 5, 8, 23, 24, 50],
        [None, "static"],
        ["float32", "bfloat16"],
    ),
)
def test_bits_of_the_same_chunks_with_every_layer(
    workspace: Any, every_layer: Callable[..., Any], kind: str, size: int, cache: str | None, dtype: str
) -> None:
    import torch

    model = workspace.load().to(getattr(torch, dtype))
    options = OPTIONS | ({"cache_implementation": cache} if cache else {})
    compare(every_layer, model, -(-24 // size), **prompt(kind, model.device), **options, prefill_chunk_size=size)


@pytest.mark.parametrize("kind", ["image", "sound", "both"])
def test_media_in_the_prompt(workspace: Any, every_layer: Callable[..., Any], kind: str) -> None:
    """Sounds are read at once, in every release; before 5.23 so are images."""
    model, batch = workspace.load(), media(kind, workspace)
    size = 7 if kind == "image" and READS_MEDIA_IN_CHUNKS else 24
    compare(every_layer, model, -(-24 // size), **batch, **OPTIONS, prefill_chunk_size=size)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_beams_and_samples(
    workspace: Any, every_layer: Callable[..., Any], options: dict[str, Any], cache: str | None
) -> None:
    import torch

    model, outputs = workspace.load(), []
    for generate in (functools.partial(every_layer, model), model.generate):
        torch.manual_seed(5)
        asked = OPTIONS | options | {"cache_implementation": cache, "prefill_chunk_size": 7}
        outputs.append(generate(**prompt("left", model.device), **asked))
    assert_same(*outputs)


def test_a_second_turn_reads_what_the_cache_lacks(workspace: Any, every_layer: Callable[..., Any]) -> None:
    model, ids, outputs = workspace.load(), prompt("one", workspace.main)["input_ids"], []
    with computed(model) as rows:
        for generate in (functools.partial(every_layer, model), model.generate):
            cache = model.generate(ids[:, :8], **OPTIONS).past_key_values
            rows.clear()
            asked = {"attention_mask": ids.new_ones(1, 24), "past_key_values": cache, "prefill_chunk_size": 5}
            outputs.append(generate(input_ids=ids, **asked, **OPTIONS))
            called = len(rows)
    assert_same(*outputs)
    assert called <= 3 + STEPS  # before 5.22 the words in the cache are read again, at the end with every layer


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
@pytest.mark.parametrize("adapter", [None, "language"])
def test_a_split_model_has_the_bits_of_one_device(
    workspace: Any, quantization: str | None, adapter: str | None
) -> None:
    from peft import PeftModel

    outputs = []
    for build in (workspace.load, workspace.split):
        model = build(quantization)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, workspace.adapter(adapter))
        for _ in range(2):
            with computed(model) as rows:
                asked = {**prompt("left", workspace.main), **OPTIONS, "prefill_chunk_size": 7}
                outputs.append(model.generate(**asked))
            assert len(rows) == 1 + STEPS
    for other in outputs[1:]:
        assert_same(outputs[0], other)


@pytest.mark.parametrize("offloaded", ["cpu", "disk"])
def test_weights_of_layers_that_do_not_run_stay_where_they_are(
    workspace: Any, every_layer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, offloaded: str
) -> None:
    """Of six layers the last two are KV-shared. The fifth is on its way when the fourth is read, and goes unused."""
    import torch

    from gemma4_compat._offload.transfer import streaming

    model = workspace.load()
    placement = tiny.device_map(model, "none", main=torch.device("cpu"), offloaded=offloaded)
    placement |= {name: offloaded for name in placement if ".layers." in name}
    model = workspace.dispatch_map(model, placement)
    decoder_layers, started = model.get_decoder().layers, []
    copy = streaming.CopyStream.start_copy

    def noted(self: Any, group: Any, size: int) -> None:
        part = next(iter(group.modules()))
        started.append(
            next(i for i, layer in enumerate(decoder_layers) if any(part is one for one in layer.modules()))
        )
        copy(self, group, size)

    monkeypatch.setattr(streaming.CopyStream, "start_copy", noted)
    asked = {**prompt("one", "cpu"), **OPTIONS, "max_new_tokens": 1, "min_new_tokens": 1, "prefill_chunk_size": 6}
    expected = every_layer(model, **asked)
    assert started.count(5) == 4
    started.clear()
    assert_same(expected, model.generate(**asked))
    assert started.count(5) == 1
    assert started.count(3) == 4


def hooked(model: Any) -> None:
    model.get_decoder().layers[-1].self_attn.q_proj.register_forward_hook(lambda *_: None)


def with_a_spy(model: Any) -> None:
    layer = model.get_decoder().layers[-1]
    forward = layer.forward

    @functools.wraps(forward)
    def spy(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    layer.forward = spy


def training(model: Any) -> None:
    model.train()


def recording(model: Any) -> None:
    model.config.get_text_config().output_hidden_states = True


def nothing(model: Any) -> None:
    """What is asked of ``generate`` says it."""


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (hooked, {}),
        (with_a_spy, {}),
        (training, {}),
        (recording, {}),
        (nothing, {"output_hidden_states": True}),
        (nothing, {"output_attentions": True}),
    ],
)
def test_every_layer_runs_where_something_may_read_more(
    workspace: Any, change: Callable[[Any], None], options: dict[str, Any]
) -> None:
    model = workspace.load()
    change(model)
    with computed(model) as rows:
        model.generate(**prompt("one", model.device), **OPTIONS, **options, prefill_chunk_size=6)
    assert len(rows) == 4 + STEPS


def test_after_hidden_states_were_asked_for_once(workspace: Any, every_layer: Callable[..., Any]) -> None:
    """The hooks of transformers stay in the layers."""
    model = workspace.load()
    asked = {**prompt("one", model.device), **OPTIONS, "prefill_chunk_size": 6}
    model.generate(**asked, output_hidden_states=True)
    compare(every_layer, model, 4, **asked)


@pytest.mark.parametrize("size", [1, 5, 6, 24])
def test_steps_that_are_replayed(workspace: Any, size: int) -> None:
    """Chunks of one token are replayed as well."""
    model = workspace.load("4bit")
    asked = {**prompt("one", model.device), **OPTIONS, "cache_implementation": "static", "prefill_chunk_size": size}
    asked |= {"max_new_tokens": 6, "min_new_tokens": 6}
    with tape.standing_in(RECORDERS):
        expected = model.generate(**asked)
        asked["disable_compile"] = False
        for _ in range(2):
            assert_same(expected, model.generate(**asked))
    assert decoder.of(model).statistics.replayed >= 8


def test_a_compiled_model(workspace: Any, every_layer: Callable[..., Any]) -> None:
    import torch

    model = workspace.load()
    model.forward = torch.compile(model.forward, backend="eager")
    asked = {**prompt("one", model.device), **OPTIONS, "prefill_chunk_size": 6}
    assert_same(every_layer(model, **asked), model.generate(**asked))
    torch._dynamo.reset()


def test_a_model_whose_layers_share_nothing(tmp_path: Any, every_layer: Callable[..., Any]) -> None:
    own = Workspace.build(tmp_path, "31B")
    model = own.load()
    asked = {**own.inputs(text_only=True), **OPTIONS, "prefill_chunk_size": 6}
    assert_same(every_layer(model, **asked), model.generate(**asked))
