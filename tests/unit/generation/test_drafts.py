"""Parts of rounds: how many drafts, what a prompt offers, how tokens are chosen, norms of several tokens."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._engine.runtime.host_copy import HostCopy
from gemma4_compat._generation.speculative import draft_length, speculative_steps
from gemma4_compat._generation.speculative.lookup import Lookup
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.fuse import pointwise, row_kernels
from gemma4_compat._kernels.fuse.pointwise import Load, Value
from gemma4_compat._kernels.match import custom
from tests.patches.generation.test_transformers_assistant_sampling import chi_square, model_logits, processors

VOCABULARY, PROMPT, DRAFTS, ROUNDS = 12, 4, 3, 2000


#: Milliseconds of a round by its number of drafts: a 4-bit E2B on an H100, from the slopes of seconds over rounds in
#: benchmarks/decoding/rounds.py, 2026-11-27.
MEASURED = {0: 2.33, 2: 3.5, 4: 3.93, 7: 4.1}


def decoded(
    share: float, ms: dict[int, float], tokens: int, dice: random.Random, known: draft_length.Known | None = None
) -> tuple[float, dict[int, int]]:
    """The speed against rounds without drafts, and how many rounds had how many drafts.

    Args:
        share: of drafts that are right.
        ms: of a round, by its number of drafts.
        tokens: of the text.
        dice: says which drafts are right, and how exact a timing is.
        known: of the texts before.
    """
    made = draft_length.DraftLength(7, known)
    written, took, counts = 0, 0.0, dict.fromkeys(ms, 0)
    late: tuple[int, int, float] | None = None
    while written < tokens:
        drafts = made.next() if written else 0  # before the first round there is nothing to draft from
        if late is not None:  # the one before is read now
            made.note(*late)
        right = next((place for place in range(drafts) if dice.random() >= share), drafts)
        late = drafts, right, ms[drafts] * dice.uniform(0.95, 1.05)
        written, took = written + right + 1, took + ms[drafts]
        counts[drafts] += 1
    assert late is not None
    made.note(*late)
    return written * ms[0] / took, counts


def best(share: float, ms: dict[int, float]) -> float:
    """The same with the best number of drafts in every round."""
    return max(sum(share**place for place in range(count + 1)) / ms[count] for count in ms) * ms[0]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.7, 0.8, 0.95])
@pytest.mark.parametrize(
    ("tokens", "least", "least_of_best"), [(64, 0.95, 0.73), (256, 0.97, 0.9), (1024, 0.98, 0.97)]
)
def test_pace_with_measured_times(share: float, tokens: int, least: float, least_of_best: float) -> None:
    """On average over texts: the first one of a model, the second, and one after a text of another kind."""
    found: dict[str, list[float]] = {"first": [], "second": [], "after another": []}
    for seed in range(40):
        dice, known, other = random.Random(seed), draft_length.Known(), draft_length.Known()
        found["first"].append(decoded(share, MEASURED, tokens, dice, known)[0])
        found["second"].append(decoded(share, MEASURED, tokens, dice, known)[0])
        decoded(0.95 if share < 0.5 else 0.0, MEASURED, 256, dice, other)
        found["after another"].append(decoded(share, MEASURED, tokens, dice, other)[0])
    means = {name: statistics.mean(of_plain) for name, of_plain in found.items()}
    assert min(means["first"], means["second"]) >= least
    assert means["after another"] >= least - (64 / tokens) * 0.07
    assert means["first"] >= least_of_best * best(share, MEASURED)
    assert means["second"] >= 0.94 * best(share, MEASURED)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("added", [0.02, 0.08, 0.2, 0.6])
def test_pace_is_near_the_best_number_and_never_slow(share: float, added: float) -> None:
    ms = {count: 1 + added * count for count in (0, *draft_length.COUNTS)}
    found, _ = decoded(share, ms, 4000, random.Random(0))
    assert found > 0.99
    assert found > 0.88 * best(share, ms)


def test_pace_tries_again_when_a_text_becomes_easy() -> None:
    made = draft_length.DraftLength(7)

    def rounds_with_drafts(share: float, of: int) -> int:
        found = 0
        for _ in range(of):
            drafts = made.next()
            found += drafts > 0
            made.note(drafts, int(share * drafts), 1 + 0.1 * drafts)
        return found

    assert rounds_with_drafts(0.0, 600) < 40
    assert rounds_with_drafts(1.0, 1500) > 500


def test_pace_without_drafts_and_with_few() -> None:
    assert draft_length.DraftLength(0).next() == 0
    made = draft_length.DraftLength(3)
    for _ in range(draft_length.FIRST):
        assert made.next() == 0
        made.note(0, 0, 1.0)
    assert made.next() in (2, 3)


def test_a_round_that_captures_is_not_timed() -> None:
    known = draft_length.Known()
    draft_length.DraftLength(7, known).note(0, 0, None)
    assert known.seconds == {}


def test_one_slow_round_is_no_reason() -> None:
    """The first round of a text looks at all of the model, and may take ten times as long."""
    known = draft_length.Known()
    made = draft_length.DraftLength(7, known)
    for seconds in (10.0, 1.0, 1.0, 1.1, 0.9):
        made.note(0, 0, seconds)
    assert known.seconds[0] == 1.0


def test_lookup_offers_what_followed_the_longest_run() -> None:
    found = Lookup(2)
    found.extend([1, 2, 3, 9, 2, 4, 1, 2])
    assert found.drafts(2) == [3, 9]
    found.extend([5, 7])
    assert found.drafts(2) == []
    found.extend([2])
    assert found.drafts(3) == [5, 7, 2]
    assert Lookup(2).drafts(3) == []


@pytest.mark.parametrize("case", ["plain", "cold", "Gemma", "top-k", "repetition penalty"])
@pytest.mark.parametrize("drafter", ["perfect", "noisy", "opposed"])
def test_two_tokens_have_the_distribution_of_plain_sampling(case: str, drafter: str) -> None:
    """As the test of transformers' own rounds; the bound is five standard deviations of chi-square."""
    torch.manual_seed(1)
    table = torch.randn(VOCABULARY, VOCABULARY) * 1.5
    drafts_of = {"perfect": table, "noisy": table + torch.randn_like(table), "opposed": -table}[drafter]
    active = processors(case)
    whole = speculative_steps.Choice(True, (), tuple(active))
    drafting = speculative_steps.Choice.of(active, samples=True)
    prompt = torch.arange(5, 5 + PROMPT).unsqueeze(0)
    expected = {}
    first = model_logits(table, active, prompt)[0, 0].softmax(-1)
    for one in range(VOCABULARY):
        text = torch.cat([prompt, torch.tensor([[one]])], dim=1)
        for two, probability in enumerate(model_logits(table, active, text)[0, 1].softmax(-1).tolist()):
            expected[one, two] = float(first[one]) * probability
    expected = {key: probability for key, probability in expected.items() if probability}
    seen: dict[Any, int] = {}
    for _ in range(ROUNDS):
        text, noise = prompt, torch.empty(PROMPT + DRAFTS, VOCABULARY).exponential_()
        while text.shape[1] < PROMPT + 2:
            place = text.shape[1] - PROMPT
            token, drafts = text[:, -1], []
            for draft in range(DRAFTS):
                token = drafting.token(text, drafts_of[token].clone(), noise[place + draft : place + draft + 1])
                drafts.append(token)
            drafted = torch.stack(drafts, dim=1)
            scores = table[torch.cat([text[:, -1:], drafted], dim=1)[0]][None].clone()
            read = {"scores": scores, "states": torch.zeros(1, DRAFTS + 1, 1), "held": torch.tensor(0)}
            own = noise[place : place + DRAFTS + 1]
            found = speculative_steps.accept(whole, text, read, drafted, own)
            assert drafter != "perfect" or case == "repetition penalty" or int(found["verdict"][0, -1]) == DRAFTS
            text = torch.cat([text, found["verdict"][:, : int(found["grown"])]], dim=1)
        key = tuple(text[0, PROMPT : PROMPT + 2].tolist())
        seen[key] = seen.get(key, 0) + 1
    statistic, freedom = chi_square(seen, expected, ROUNDS)
    assert (statistic - freedom) / math.sqrt(2 * freedom) < 5


@pytest.mark.parametrize("columns", [256, 1536, 2560, 3840])
def test_means_of_several_tokens_are_those_of_each(on_host: kernels.Kernels, columns: int) -> None:
    """PyTorch on a GPU adds the numbers of a row in an order that depends on how many rows there are."""
    tokens = 5
    given = torch.randn((1, tokens, columns), generator=torch.Generator().manual_seed(0))
    assert pointwise.order(tokens, columns) != pointwise.order(1, columns) or columns == 256

    def means(tensor: Any, parts: int) -> Any:
        memory = tensor.new_empty((*tensor.shape[:-1], 1))
        operand = Load(tensor, tensor.stride())
        value = Value(pointwise.MEAN, (operand,), tuple(memory.shape), tensor.dtype, columns=columns, parts=parts)
        value.memory = memory
        (kernel,) = row_kernels.kernels_of([value])
        on_host.prepare([kernel.text], [])
        on_host.launch(kernel)
        return memory

    alone = torch.cat([means(one.clone(), 1) for one in given.split(1, dim=1)], dim=1)
    assert torch.equal(means(given, tokens), alone)


@pytest.mark.parametrize(
    ("batch", "tokens", "parts"), [(1, 5, [5]), (4, 1, [4]), (2, 3, [6]), (32, 2, [64]), (1, 1, []), (65, 1, [])]
)
@pytest.mark.parametrize("heads", [(), (4,)])
def test_as_many_tokens_as_kernels_take_have_means_of_their_own(
    monkeypatch: pytest.MonkeyPatch, batch: int, tokens: int, parts: list[int], heads: tuple[int, ...]
) -> None:
    """In norms of all that a token has, and of each head."""
    asked: list[int] = []
    computed = custom.CustomKernels._computed

    def noted(mode: Any, operator: Any, given: Any, count: int) -> Any:
        asked.append(count)
        return computed(mode, operator, given, count)

    monkeypatch.setattr(custom.CustomKernels, "_computed", noted)
    given = torch.randn((batch, tokens, *heads, 64))
    expected = given.mean(-1, keepdim=True)
    with custom.CustomKernels(given.device, tokens):
        assert torch.equal(given.mean(-1, keepdim=True), expected)
    assert asked == parts


def test_likely_tokens_are_those_of_transformers() -> None:
    """An assistant with ordered embeddings computes logits of the likeliest groups; the same without the host."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "Gemma4AssistantConfig"):
        pytest.skip("this release has no assistants")
    from transformers.models.gemma4_assistant import modeling_gemma4_assistant as upstream

    text = transformers.Gemma4TextConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)
    config = transformers.Gemma4AssistantConfig.__new__(transformers.Gemma4AssistantConfig)
    config.num_centroids, config.centroid_intermediate_top_k = 8, 3
    config.get_text_config = lambda *_, **__: text
    embedder = upstream.Gemma4AssistantMaskedEmbedder(config).bfloat16()
    generator = torch.Generator().manual_seed(0)
    embedder.token_ordering = torch.randperm(64, generator=generator)
    hidden = torch.randn((1, 1, 16), generator=generator).bfloat16()
    weight = torch.randn((64, 16), generator=generator).bfloat16()
    with torch.no_grad():
        assert torch.equal(embedder(hidden, weight), speculative_steps._likely(embedder, hidden, weight))


def test_what_the_host_reads_is_of_the_time_of_the_copy() -> None:
    tensor = torch.arange(3)
    copy = HostCopy(tensor)
    tensor.zero_()
    assert copy.tolist() == [0, 1, 2]
