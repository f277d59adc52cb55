"""Calls with an assistant model or prompt lookup as users make them, of the trained tiny model and of random ones."""

from __future__ import annotations

import random
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._generation.speculative import (
    assisted,
    draft_length,
    draft_windows,
    drafted_calls,
    speculative_steps,
)
from gemma4_compat._kernels.match import custom
from gemma4_compat._lab.trained import PLACE, TWINS, Trained
from tests.helpers import ROOT
from tests.unit.generation import calls
from tests.unit.generation.calls import Models
from tests.unit.generation.test_assisted import AnyLength, ask, counted, drafting, fast, same
from tests.unit.generation.test_drafts import MEASURED
from tests.unit.kernels.by_rows import ByRows

pytest.importorskip("transformers.models.gemma4_assistant")
pytestmark = [pytest.mark.usefixtures("by_rows"), pytest.mark.xdist_group("trained")]

TRAINED = Trained(ROOT / PLACE)
#: Of places in a distribution.
BINS = 5
STORY, FACT = "Tell of a mole and a bear.", "What colour is snow?"


@pytest.fixture
def by_rows(tapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom, "CustomKernels", ByRows)
    monkeypatch.setattr(custom, "unsupported_reason", lambda _device: None)


@pytest.fixture
def any_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_length, "DraftLength", AnyLength)


@pytest.fixture(scope="module")
def drafter() -> Any:
    """The trained assistant."""
    from tools.trained_model import assistant

    found = assistant.load(TRAINED)
    found.generation_config.num_assistant_tokens = 4
    return found


@pytest.fixture(scope="module")
def loaded() -> Any:
    return TRAINED.load()


@pytest.fixture
def trained(loaded: Any, by_rows: None, any_pace: None) -> Iterator[Any]:
    """The trained model after ``decode_fast``."""
    yield gemma4_compat.decode_fast(loaded, assistants=True)
    gemma4_compat.decode_fast(loaded, enabled=False)
    loaded.generation_config.max_cache_len = None


@pytest.fixture(scope="module")
def assistant(workspace: Any) -> Any:
    return workspace.load_assistant()


def ways(drafter: Any) -> list[dict[str, Any]]:
    return [{"assistant_model": drafter}, {"prompt_lookup_num_tokens": 5}]


def said(model: Any, given: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(4)
    return model.generate(**given, **{"max_new_tokens": 60, "do_sample": False, **options})


def test_time_runs_out(trained: Any, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for after each token, as without drafts: after as many readings of the clock, the text ends."""
    from transformers.generation import stopping_criteria

    clock = iter(range(10**6))
    monkeypatch.setattr(stopping_criteria, "time", types.SimpleNamespace(time=lambda: float(next(clock))))
    given = TRAINED.prompt(STORY)
    expected = said(trained, given, max_time=20.0, eos_token_id=None)
    assert expected.shape[1] < given["input_ids"].shape[1] + 30
    for way in ways(drafter):
        assert torch.equal(said(trained, given, max_time=20.0, eos_token_id=None, **way), expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_turns_on_one_cache_with_an_assistant_and_without(trained: Any, drafter: Any, kind: str) -> None:
    """With drafts, transformers reads all of the text once more after what the cache holds."""
    from transformers import DynamicCache

    sequences = [[*ways(drafter)[:1], {}, *ways(drafter)[1:]], [{}, *ways(drafter)]]
    for sequence in sequences:
        cache = DynamicCache(config=trained.config) if kind == "dynamic" else calls.static_cache(trained, 512)
        ids = TRAINED.prompt(STORY)["input_ids"]
        for way in sequence:
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            text = said(trained, given, past_key_values=cache, **way)
            assert int(cache.get_seq_length()) == text.shape[1] - 1
            assert torch.equal(text, said(trained, given))
            ids = torch.cat([text, TRAINED.prompt(FACT)["input_ids"][:, 1:]], dim=1)
    assert {one for one in counted(trained).reasons if not one.startswith("the call was given a cache")} <= {
        "the cache is the caller's",
        "no token can be taken back from a static cache",
        "the cache holds the beginning of the text",
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_call_after_one_that_was_interrupted(trained: Any, drafter: Any, error: type[BaseException]) -> None:
    """By the caller's streamer, within an accepted block of a greedy text, and of a sampled one."""

    class Raises:
        def __init__(self, at: int) -> None:
            self.left = at

        def put(self, _: Any) -> None:
            self.left -= 1
            if not self.left:
                raise error("enough")

        def end(self) -> None: ...

    given, sampled = TRAINED.prompt(STORY), {"do_sample": True, "temperature": 1.0}
    expected = [said(trained, given, **options) for options in ({}, sampled)]
    for at in (1, 2, 9, 16):
        for options in ({}, sampled):
            with pytest.raises(error, match="enough"):
                said(trained, given, streamer=Raises(at), assistant_model=drafter, **options)
        for options, one in zip(({}, sampled), expected):
            assert torch.equal(said(trained, given, assistant_model=drafter, **options), one)
            assert torch.equal(said(trained, given, **options), one)


@pytest.mark.usefixtures("any_pace")
def test_adapters_are_switched_between_calls(drafter: Any) -> None:
    from peft import PeftModel

    base = gemma4_compat.decode_fast(TRAINED.load(), assistants=True)
    given = TRAINED.prompt("How many legs has a fox?")
    plain = said(base, given)
    model = PeftModel.from_pretrained(base, str(TRAINED.adapter)).eval()
    pirate = said(model, given)
    assert not torch.equal(plain, pirate)
    for way in ways(drafter):
        assert torch.equal(said(model, given, **way), pirate)
        with model.disable_adapter():
            assert torch.equal(said(model, given, **way), plain)
        assert torch.equal(said(model, given, **way), pirate)
    assert counted(model).reasons == ()
    assert counted(model).accepted > 20


def test_an_assistant_in_4_bits(trained: Any) -> None:
    from transformers import BitsAndBytesConfig, Gemma4AssistantForCausalLM

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    quantized = Gemma4AssistantForCausalLM.from_pretrained(
        str(TRAINED.assistant), dtype=torch.bfloat16, quantization_config=config
    ).eval()
    given, before = TRAINED.prompt(STORY), counted(trained).accepted
    assert torch.equal(said(trained, given, assistant_model=quantized), said(trained, given))
    assert counted(trained).accepted > before + 10
    assert counted(quantized).reasons == ()


def test_a_watermark_remembers_no_rejected_draft(
    trained: Any, drafter: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SynthID's processor keeps the last tokens that it was called with."""
    from transformers import SynthIDTextWatermarkingConfig

    config = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340, 443, 597, 160, 57], ngram_len=5)
    options = {"do_sample": True, "temperature": 1.5, "top_k": 0, "watermarking_config": config}
    given = TRAINED.prompt(STORY)
    expected = said(trained, given, **options)
    for way in ways(drafter):
        assert torch.equal(said(trained, given, **options, **way), expected)
    assert "decoding without drafts: a logits processor remembers the tokens that it has seen" in caplog.text
    monkeypatch.setattr(drafted_calls, "_WITH_A_STATE", ())
    assert not torch.equal(said(trained, given, **options, assistant_model=drafter), expected)


def test_experts_in_bfloat16_have_the_text_without_an_assistant(tmp_path: Path) -> None:
    """With a tiny 26B-A4B one text of three differed, although the first try had found the same bits."""
    from benchmarks.decoding import rounds_trained

    twin = Trained(ROOT / TWINS["26B-A4B"])
    expected = []
    for place in ("device", "experts"):
        model = gemma4_compat.decode_fast(rounds_trained.placed(twin, "bf16", place, tmp_path), assistants=True)
        for options in ({}, {"do_sample": True}, {"return_dict_in_generate": True, "output_scores": True}):
            expected.append(said(model, twin.prompt(FACT), **options))
            before = counted(model)
            found = said(model, twin.prompt(FACT), prompt_lookup_num_tokens=5, **options)
            if "output_scores" in options:
                assert len(found.scores) == len(expected[-1].scores)
                found, expected[-1] = found.sequences, expected[-1].sequences
            assert torch.equal(found, expected[-1])
            assert counted(model).replayed > before.replayed
            assert counted(model).rounds == 0
        (reason,) = counted(model).reasons
        assert reason == "experts: a token differs bitwise beside others, as the experts are not in 4 bits"
    assert all(map(torch.equal, expected, expected[-3:]))


@pytest.mark.usefixtures("any_pace")
def test_what_another_thread_reads_is_not_a_state_of_this_round(
    models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While each forward of a round runs, or is captured, another thread reads a prompt with the same model."""
    model = fast(models, None)
    given, other = calls.text(model, 12), calls.text(model, 5, seed=8)
    expected = ask(model, given, new=40)
    drafting(monkeypatch, expected[0], 0.7)
    write, running = draft_windows._write, [False]

    def beside(*args: Any, **kwargs: Any) -> Any:
        if not running[0]:
            running[0] = True
            thread = threading.Thread(target=lambda: model(**other))
            thread.start()
            thread.join()
            running[0] = False
        return write(*args, **kwargs)

    monkeypatch.setattr(draft_windows, "_write", beside)
    same(expected, ask(model, given, new=40, assistant_model=assistant))
    assert counted(model).reasons == ()
    assert counted(model).accepted > 10


@pytest.mark.full
def test_three_threads(trained: Any, drafter: Any) -> None:
    prompts = [TRAINED.prompt(question) for question in (STORY, FACT, "Why is the sky blue?")]
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    expected = [trained.generate(**given, **options) for given in prompts]
    found: dict[int, list[Any]] = {}
    before = counted(trained).reasons  # of other tests

    def work(index: int) -> None:
        found[index] = [trained.generate(**prompts[index], **options, **way) for way in ways(drafter)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, expected[index]) for index in range(3) for one in found[index])
    assert len(found) == 3
    assert counted(trained).reasons == before


@pytest.mark.full
def test_drafting_stops_where_it_does_not_pay_and_begins_again(
    models: Models, assistant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 300 tokens 5 % of the drafts are right, then all. Rounds take as long as those of an E2B on an H100."""
    model = fast(models, None)
    given = calls.text(model, 12)
    expected = ask(model, given, new=700)
    turn, dice = 12 + 300, random.Random(1)
    seconds, noted = [0.0], []

    def drafted(self: assisted.Text, count: int) -> Any:
        held = int(self._state["held"])
        true = expected[0][0, held + 1 : held + 1 + count].tolist()
        share = 0.05 if held < turn else 1.0
        found = [token if dice.random() < share else (token + 1) % 256 for token in true]
        return torch.tensor([found + [0] * (count - len(found))])

    class Timed(speculative_steps.Launched):
        def read(self) -> list[int]:
            seconds[0] += MEASURED[self.drafts] / 1000
            found = super().read()
            noted.append((self.drafts, found[-1] + 1, seconds[0]))
            return found

    monkeypatch.setattr(assisted.Text, "_drafted", drafted)
    monkeypatch.setattr(speculative_steps, "Launched", Timed)
    monkeypatch.setattr(assisted, "time", types.SimpleNamespace(perf_counter=lambda: seconds[0]))
    same(expected, ask(model, given, new=700, assistant_model=assistant))

    written, hard, easy = 12, [], []
    for drafts, grown, now in noted:
        (hard if written < turn else easy).append((drafts, grown, now))
        written += grown
    of_plain = MEASURED[0] / 1000 * sum(grown for _, grown, _ in hard) / hard[-1][2]
    assert of_plain > 0.95
    assert 2 <= sum(drafts > 0 for drafts, *_ in hard) < 15
    assert sum(drafts == 7 for drafts, *_ in easy[-12:]) >= 10  # one may be without, to see what it takes
    plain = MEASURED[0] / 1000 * sum(grown for _, grown, _ in noted)
    assert seconds[0] < 0.8 * plain


GEMMA = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
#: Options of ``generate``, and the processors that transformers makes of them, in its order.
SAMPLINGS: dict[str, tuple[dict[str, Any], list[tuple[Any, ...]]]] = {
    "plain": ({"top_k": 0}, []),
    "cold": ({"temperature": 0.7, "top_k": 0}, [("TemperatureLogitsWarper", 0.7)]),
    "Gemma": (GEMMA, [("TopKLogitsWarper", 64), ("TopPLogitsWarper", 0.95)]),
    "processors": (
        {**GEMMA, "repetition_penalty": 1.3, "suppress_tokens": [101], "min_new_tokens": 30},
        [
            *(("RepetitionPenaltyLogitsProcessor", 1.3), ("SuppressTokensLogitsProcessor", [101])),
            *(("TopKLogitsWarper", 64), ("TopPLogitsWarper", 0.95)),
        ],
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("sampling", "where", "looks_up"),
    [
        ("Gemma", "device", False),
        ("Gemma", "streamed", True),
        ("plain", "streamed", False),
        ("cold", "device", True),
        ("processors", "device", False),
    ],
)
@pytest.mark.usefixtures("any_pace")
def test_sampled_texts_have_the_distribution_of_plain_sampling(
    drafter: Any, sampling: str, where: str, tmp_path: Path, *, looks_up: bool
) -> None:
    """They are the texts of plain sampling with the same seed, and so is what each token is drawn from.

    A token's place in the model's distribution, given all before it, is evenly distributed, where no token is nearly
    certain. One forward of the whole text gives the probabilities; the bound: five standard deviations of chi-square.
    """
    import transformers

    from benchmarks.decoding import rounds_trained

    model = gemma4_compat.decode_fast(rounds_trained.placed(TRAINED, "bf16", where, tmp_path), assistants=True)
    options, named = SAMPLINGS[sampling]
    processors = transformers.LogitsProcessorList([getattr(transformers, name)(*values) for name, *values in named])
    given, dice = TRAINED.prompt(STORY), random.Random(0)
    way = ways(drafter)[looks_up]
    bins, asked = [0] * BINS, {"do_sample": True, "eos_token_id": None, "max_new_tokens": 120, **options}
    for seed in range(4):
        torch.manual_seed(seed)
        text = model.generate(**given, **asked, **way)
        torch.manual_seed(seed)
        assert torch.equal(text, model.generate(**given, **asked))
        with torch.no_grad():
            logits = model(text).logits.float()
        for place in range(given["input_ids"].shape[1], text.shape[1]):
            shares = processors(text[:, :place], logits[:, place - 1].clone())[0].softmax(-1)
            own, below = float(shares[text[0, place]]), float(shares[: text[0, place]].sum())
            if float(shares.max()) < 0.95:
                bins[min(int(BINS * (below + dice.random() * own)), BINS - 1)] += 1
    assert sum(bins) >= 5 * BINS
    expected = sum(bins) / BINS
    statistic = sum((one - expected) ** 2 for one in bins) / expected
    assert (statistic - BINS + 1) / (2 * (BINS - 1)) ** 0.5 < 5
