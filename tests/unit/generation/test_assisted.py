"""Texts with an assistant model or prompt lookup by replay: ``decode_fast(assistants=True)``."""

from __future__ import annotations

import random
import types
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._generation.speculative import assisted, draft_length
from gemma4_compat._graphs import decoder, deferred_stop, fused_steps
from gemma4_compat._kernels.match import custom
from tests.unit.generation import calls
from tests.unit.generation.calls import Models
from tests.unit.kernels.by_rows import ByRows

pytestmark = pytest.mark.usefixtures("tapes")
VOCABULARY = 256


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "CustomKernels", ByRows)
    monkeypatch.setattr(custom, "unsupported_reason", lambda _device: None)


@pytest.fixture(scope="module")
def assistant(workspace: Any) -> Any:
    try:
        return workspace.load_assistant()
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))


class AnyLength(draft_length.DraftLength):
    """Numbers of drafts at random, whatever rounds take."""

    def __init__(self, most: int, known: draft_length.Known | None = None) -> None:
        super().__init__(most, known)
        self._random = random.Random(most)

    def next(self) -> int:
        return self._random.choice([0, *self._counts])


@pytest.fixture
def any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_length, "DraftLength", AnyLength)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Rounds are read late from the first timed one on. For each: whether it was launched before another was read."""
    monkeypatch.setattr(deferred_stop, "WAITING", 10.0)
    found: list[bool] = []
    launch = assisted.Text._launch

    def noted(self: assisted.Text, *args: Any) -> None:
        found.append(bool(self._launched))
        launch(self, *args)

    monkeypatch.setattr(assisted.Text, "_launch", noted)
    return found


def fast(models: Models, *where: Any) -> Any:
    return gemma4_compat.decode_fast(models.fresh(*where), assistants=True)


def drafting(monkeypatch: pytest.MonkeyPatch, text: Any, share: float) -> None:
    """An assistant whose drafts are the tokens of ``text``, (1, length), each altered with probability 1 - share."""
    dice = random.Random(1)

    def drafted(self: assisted.Text, count: int) -> Any:
        held = int(self._state["held"])  # the host may not have read it
        true = text[0, held + 1 : held + 1 + count].tolist()
        true += [0] * (count - len(true))
        found = [token if dice.random() < share else (token + 1) % VOCABULARY for token in true]
        return torch.tensor([found], device=text.device)

    monkeypatch.setattr(assisted.Text, "_drafted", drafted)


def ask(model: Any, given: dict[str, Any], *, new: int, seed: int = 3, **options: Any) -> Any:
    """The tokens, and the next random number."""
    torch.manual_seed(seed)
    asked = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None}
    return model.generate(**given, **(asked | options)), torch.rand(1)


def same(one: Any, other: Any) -> None:
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def counted(model: Any) -> Any:
    return calls.steps(model)


SAMPLED = {"do_sample": True, "top_k": 30, "top_p": 0.95, "temperature": 0.9}


@pytest.mark.usefixtures("by_rows", "any_pace")
@pytest.mark.parametrize("share", [pytest.param(0.0, marks=[pytest.mark.full]), 0.3, 0.7, 1.0])
def test_tokens_are_those_without_an_assistant(
    models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch, late: list[bool], share: float
) -> None:
    """Greedy and sampled, past the window and past the room beside it, to the last position of the cache."""
    model = fast(models, None)
    for seed, (length, options) in enumerate([(3, {}), (30, SAMPLED), (12, {})]):
        given = calls.text(model, length, seed=seed)
        expected = ask(model, given, new=110, **options)
        with monkeypatch.context() as patched:
            drafting(patched, expected[0], share)
            same(expected, ask(model, given, new=110, assistant_model=assistant, **options))
    found = counted(model)
    assert found.reasons == ()
    assert found.drafted > 100
    assert found.rounds < 330
    assert late.count(True) > 0.6 * len(late)
    if share in (0, 1):
        assert found.accepted == share * found.drafted
    else:
        assert 0 < found.accepted < found.drafted


@pytest.mark.usefixtures("by_rows", "any_pace", "late")
@pytest.mark.parametrize(
    ("quantization", "adapter", "where"), [("4bit-double", "language", "host"), (None, "language", "streamed")]
)
def test_every_placement(
    models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch, quantization: Any, adapter: Any, where: str
) -> None:
    model = fast(models, quantization, adapter, where)
    given = calls.text(model, 12)
    expected = ask(model, given, new=40)
    same(expected, ask(model, given, new=40, assistant_model=assistant))
    drafting(monkeypatch, expected[0], 0.7)
    same(expected, ask(model, given, new=40, assistant_model=assistant))
    assert counted(model).accepted > 10
    assert counted(model).reasons == ()


@pytest.mark.usefixtures("by_rows")
def test_a_text_without_drafts_is_read_late(
    models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch, late: list[bool]
) -> None:
    """Sampled, and ended by a token: what was launched after it is dropped, and so are its random numbers."""
    monkeypatch.setattr(draft_length.DraftLength, "next", lambda _self: 0)
    model = fast(models, None)
    given = calls.text(model, 12)
    for _ in range(2):  # the second time, steps are replayed from the first round on
        text = ask(model, given, new=40, **SAMPLED)[0]
        late.clear()
        for place in (15, 21, 40):
            options = {**SAMPLED, "eos_token_id": int(text[0, place])}
            same(ask(model, given, new=40, **options), ask(model, given, new=40, assistant_model=assistant, **options))
    assert late.count(True) > 0.5 * len(late)


@pytest.mark.usefixtures("by_rows")
def test_code_of_the_caller_sees_no_round_too_many(models: Models, assistant: Any, late: list[bool]) -> None:
    """Their streamer may change weights, so each round is read before the next one is launched."""

    class Streamer:
        def put(self, value: Any) -> None: ...

        def end(self) -> None: ...

    model = fast(models, None)
    for _ in range(2):
        ask(model, calls.text(model, 12), new=20, streamer=Streamer(), assistant_model=assistant)
    assert late
    assert not any(late)


@pytest.mark.usefixtures("by_rows", "any_pace", "late")
def test_prompt_lookup(models: Models) -> None:
    """A random model soon repeats itself."""
    model = fast(models, None)
    for seed, options in enumerate([{}, {"do_sample": True, "top_k": 2}, {"max_matching_ngram_size": 3}]):
        given = calls.text(model, 20, seed=seed)
        expected = ask(model, given, new=60, **options)
        same(expected, ask(model, given, new=60, prompt_lookup_num_tokens=5, **options))
    assert counted(model).accepted > 0
    assert counted(model).reasons == ()


@pytest.mark.usefixtures("by_rows", "any_pace", "late")
def test_an_end_within_accepted_drafts(models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each kind: a token, a limit, and the caller's own criterion, which is asked for each token."""
    from transformers import StoppingCriteria

    class Holds(StoppingCriteria):  # type: ignore[misc]
        def __init__(self, token: int) -> None:
            self.token, self.lengths = token, []

        def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
            self.lengths.append(ids.shape[1])
            return ids[:, -1] == self.token

    model = fast(models, None)
    given = calls.text(model, 12)
    text = ask(model, given, new=40)[0]
    drafting(monkeypatch, text, 1.0)
    for place in range(14, 28, 3):
        token = int(text[0, place])
        expected = ask(model, given, new=40, eos_token_id=token)
        same(expected, ask(model, given, new=40, eos_token_id=token, assistant_model=assistant))
        one, other = Holds(token), Holds(token)
        expected = ask(model, given, new=40, stopping_criteria=[one])
        same(expected, ask(model, given, new=40, stopping_criteria=[other], assistant_model=assistant))
        assert one.lengths == other.lengths
        same(ask(model, given, new=place), ask(model, given, new=place, assistant_model=assistant))


@pytest.mark.usefixtures("by_rows", "any_pace")
@pytest.mark.parametrize("samples", [False, True])
def test_processors_that_read_the_text(
    models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch, *, samples: bool
) -> None:
    model = fast(models, None)
    given = calls.text(model, 12)
    options = {"repetition_penalty": 1.4, "min_new_tokens": 20, "do_sample": samples, "top_k": 40}
    expected = ask(model, given, new=40, **options)
    drafting(monkeypatch, expected[0], 0.7)
    same(expected, ask(model, given, new=40, assistant_model=assistant, **options))
    assert counted(model).accepted > 10


@pytest.mark.usefixtures("by_rows", "any_pace")
def test_a_streamer_gets_every_token(models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: Any) -> None:
            self.got.append(value.tolist())

        def end(self) -> None:
            self.got.append("end")

    model = fast(models, None)
    given = calls.text(model, 12)
    one, other = Streamer(), Streamer()
    expected = ask(model, given, new=20, streamer=one)
    drafting(monkeypatch, expected[0], 0.7)
    ask(model, given, new=20, streamer=other, assistant_model=assistant)
    assert one.got == other.got


@pytest.mark.usefixtures("by_rows", "any_pace")
def test_graphs_and_memory_are_reused(models: Models, assistant: Any) -> None:
    model = fast(models, None)
    given = calls.text(model, 12)
    found = []
    for seed in range(6):
        ask(model, given, new=60, seed=seed, assistant_model=assistant)
        known = decoder.of(model)
        windows = {memory.windows.addresses for memory in known.memories if memory.windows is not None}
        found.append((counted(model).captured, counted(assistant).captured, len(known.memories), windows))
    assert found[2:] == found[2:3] * 4
    assert counted(model).recaptures == {}
    gemma4_compat.decode_fast(model, enabled=False)
    assert decoder.of(model).memories == []
    assert not decoder.of(assistant).captured


@pytest.mark.usefixtures("any_pace")
def test_rows_with_other_bits_are_found_out(
    models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bits of several tokens differ in the last place: the text is still that of single tokens."""

    class Rounds(ByRows):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = super().__torch_function__(func, types, args, kwargs)
            return found * (1 + 2**-6) if func is torch.nn.functional.linear and self._tokens > 1 else found

    monkeypatch.setattr(custom, "CustomKernels", Rounds)
    monkeypatch.setattr(custom, "unsupported_reason", lambda _device: None)
    model = fast(models, None)
    given = calls.text(model, 12)
    expected = ask(model, given, new=40)
    for _ in range(2):
        same(expected, ask(model, given, new=40, assistant_model=assistant))
    assert counted(model).drafted == 0
    assert [reason for reason in counted(model).reasons if reason.endswith("differ bitwise from one by one")]
    assert "decoding without drafts: " in caplog.text


@pytest.mark.usefixtures("by_rows")
def test_only_replays_are_timed(models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a kind and a capture take as long as hundreds of replays."""
    model = fast(models, None)
    timed: list[bool] = []

    class Noted(AnyLength):
        def note(self, drafts: int, right: int, seconds: float | None) -> None:
            timed.append(seconds is not None)

    monkeypatch.setattr(draft_length, "DraftLength", Noted)
    monkeypatch.setattr(draft_length, "COUNTS", (3,))
    ask(model, calls.text(model, 12), new=60, assistant_model=assistant)
    assert not timed[0]
    assert 2 <= timed.count(False) <= 5  # at most twice for each of three kinds, and the first try is never noted
    assert all(timed[-10:])


@pytest.mark.usefixtures("by_rows")
def test_the_next_text_begins_with_what_is_known(models: Models, assistant: Any) -> None:
    """By assistant; prompt lookup has its own. Turning it off forgets it."""
    model = fast(models, None)
    given = calls.text(model, 12)
    ask(model, given, new=30, assistant_model=assistant)
    known = decoder.of(model).draft_lengths
    first = dict(known[assistant].seconds)
    assert 0 in first
    ask(model, given, new=30, assistant_model=assistant)
    assert known[assistant].seconds.keys() >= first.keys()
    ask(model, given, new=30, prompt_lookup_num_tokens=3)
    assert set(known) == {assistant, model}
    gemma4_compat.decode_fast(model, enabled=False)
    assert not known


@pytest.mark.parametrize(("plain", "drafting"), [(True, False), (False, True), (True, True), (False, False)])
def test_graphs_that_are_behind_are_fused_before_rounds_are_compared(*, plain: bool, drafting: bool) -> None:
    """A fused round without drafts may be faster than one with drafts that is not fused, at any acceptance."""
    from concurrent.futures import Future

    def graph(*, fused: bool) -> Any:
        found = types.SimpleNamespace(progress=fused_steps.Progress())
        if fused:
            found.progress.hasten()
            assert found.progress.is_due()
        return None, found

    text = assisted.Text.__new__(assisted.Text)
    text._last = {0: graph(fused=plain), 4: graph(fused=drafting), (4, 1): graph(fused=drafting)}
    assert text._is_ready(0)
    if plain == drafting:
        assert text._is_ready(4)
        return
    assert text._is_ready(4) == plain  # a round of the kind that is behind
    behind = text._last[4 if plain else 0][1].progress
    assert behind.is_due()
    future: Future[None] = Future()
    behind.postpone([future])
    assert text._is_ready(4) != plain  # the other kind, while its kernels are compiled
    future.set_result(None)
    assert text._is_ready(4) == plain
    assert behind.is_due()


def test_times_from_before_graphs_were_fused_are_dropped() -> None:
    known = draft_length.Known()
    for fused in (False, True):
        known.note_fused(4, fused=fused)
        assert known.seconds == {}
        known.note(4, 0, 2.0 - fused)
    assert known.seconds == {4: 1.0}


@pytest.mark.usefixtures("by_rows", "any_pace")
def test_what_cannot_be_captured_has_no_drafts(models: Models, assistant: Any) -> None:
    model = fast(models, None)
    given = calls.text(model, 12)
    with torch.autocast("cpu", torch.bfloat16):
        same(ask(model, given, new=12), ask(model, given, new=12, assistant_model=assistant))
    assert (counted(model).rounds, counted(model).drafted) == (11, 0)
    assert [reason for reason in counted(model).reasons if reason.startswith("autocast")]


@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize("exact", [False, True])
def test_without_the_option_nothing_changes_and_the_log_says_so(
    models: Models, assistant: Any, caplog: pytest.LogCaptureFixture, exact: bool
) -> None:
    """Unless the bits of PyTorch are asked for, which rounds do not have."""
    model = gemma4_compat.decode_fast(models.fresh(None), exact=exact)
    for _ in range(2):
        ask(model, calls.text(model, 12), new=8, assistant_model=assistant)
        ask(model, calls.text(model, 12), new=8, assistant_model=assistant, disable_compile=True)
    assert counted(model).rounds == counted(model).replayed == 0
    said = [one for one in caplog.messages if "decode_fast was called without assistants=True" in one]
    assert len(said) == len(counted(model).reasons) == (0 if exact else 1)


@pytest.mark.usefixtures("by_rows")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"return_dict_in_generate": True}, "more is returned than tokens"),
        ({"past_key_values": "own"}, "the cache is the caller's"),
        ({"logits_processor": [lambda _ids, scores: scores]}, "a logits processor is not transformers' own"),
        ({"attention_mask": "padded"}, "the prompt is padded, or not of tokens"),
    ],
)
def test_what_is_left_to_transformers(
    models: Models, assistant: Any, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    from transformers import DynamicCache

    model = fast(models, None)
    given = calls.text(model, 12)
    if options.get("attention_mask") == "padded":
        mask = torch.ones_like(given["input_ids"])
        mask[0, :3] = 0
        options = {"attention_mask": mask}
    if options.get("past_key_values") == "own":
        options = {"past_key_values": DynamicCache()}
    model.generate(**{**given, **options}, do_sample=False, max_new_tokens=8, assistant_model=assistant)
    assert counted(model).rounds == 0
    assert counted(model).reasons == (reason,)
    assert f"decoding with an assistant as transformers does: {reason}" in caplog.text


def test_exact_arithmetic_has_no_rounds(models: Models) -> None:
    model = models.fresh("4bit")
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="exact=True and assistants=True"):
        gemma4_compat.decode_fast(model, exact=True, assistants=True)
    assert not decoder.of(model).preferred


@pytest.mark.full
def test_kernels_give_tokens_of_a_round_the_bits_of_single_ones(
    kernels_on_host: None, models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels themselves, in an emulator, captured and fused."""
    monkeypatch.setattr(fused_steps.Progress, "after", 2)
    monkeypatch.setattr(draft_length, "COUNTS", (3,))
    monkeypatch.setattr(draft_length, "DraftLength", AnyLength)
    model = fast(models, "4bit-double", "language")
    given = calls.text(model, 6)
    expected = ask(model, given, new=24)
    drafting(monkeypatch, expected[0], 0.7)
    same(expected, ask(model, given, new=24, assistant_model=assistant))
    found = counted(model)
    assert (found.reasons, found.not_fused) == ((), ())
    assert found.accepted > 2
    assert found.fused == 3  # steps, and rounds of one token and of four
