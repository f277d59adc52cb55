"""Sampling with an assistant model (F85): frequencies are those of the model, whatever the assistant thinks."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat.patches.generation.transformers_assistant_sampling import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise

VOCABULARY, PROMPT, DRAFTS, ROUNDS = 12, 4, 3, 800
#: Name -> classes of processors and their arguments, in the order of `generate`. "Gemma": its own defaults.
CASES: dict[str, list[tuple[Any, ...]]] = {
    "plain": [],
    "cold": [("TemperatureLogitsWarper", 0.5)],
    "Gemma": [("TemperatureLogitsWarper", 1.0), ("TopKLogitsWarper", 64), ("TopPLogitsWarper", 0.95)],
    "top-k": [("TopKLogitsWarper", 3)],
    "hot, top-p": [("TemperatureLogitsWarper", 1.5), ("TopPLogitsWarper", 0.7)],
    "repetition penalty": [("RepetitionPenaltyLogitsProcessor", 1.8)],
    "minimum length": [("MinLengthLogitsProcessor", PROMPT + 3, 1)],
    "bad words": [("NoBadWordsLogitsProcessor", [[2], [3, 4]])],
}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"a token of probability 0.4 in \d+ of 100 places"
    exact = False


class Gemma4AssistantStandIn:
    """An assistant of the right name: the next token's logits depend on the newest token only.

    ``inputs_embeds`` holds the token's number, because the embedding of :func:`generator` is the number itself.
    """

    device = "cpu"

    def __init__(self, table: Any) -> None:
        self.table = table
        self.generation_config = SimpleNamespace(num_assistant_tokens=DRAFTS)

    def __call__(self, inputs_embeds: Any, **_: Any) -> Any:
        token = inputs_embeds[0, 0, 0].long()
        return SimpleNamespace(
            logits=self.table[token].view(1, 1, -1).clone(), last_hidden_state=inputs_embeds[..., 1:]
        )


def processors(case: str) -> Any:
    """The processors of a case."""
    import transformers

    active = [getattr(transformers, name)(*values) for name, *values in CASES[case]]
    return transformers.LogitsProcessorList(active)


def generator(table: Any, active: Any, *, patched: bool = True) -> Any:
    """Upstream's candidate generator of :class:`Gemma4AssistantStandIn`, if ``patched`` as the patch prepares it."""
    from transformers import GenerationConfig
    from transformers.generation import candidate_generator as upstream
    from transformers.generation import utils

    from gemma4_compat.patches.generation import transformers_assistant_sampling as patch

    kind = upstream.SinglePositionMultiTokenCandidateGenerator
    made = kind.__new__(kind)  # the arguments of its __init__ differ between releases
    made.assistant_model = Gemma4AssistantStandIn(table)
    made.target_model_input_embeddings = lambda token: token.unsqueeze(-1).float()
    made.generation_config = GenerationConfig(do_sample=True, pad_token_id=0)
    made.num_assistant_tokens, made.main_model_max_length = DRAFTS, 100
    made.is_main_model_prefill, made.eos_token_id = True, None
    assert utils  # imported, so that the patch is applied
    return patch.candidate_generator(lambda *_, **__: made, None, logits_processor=active) if patched else made


def candidates(made: Any, tokens: Any) -> tuple[Any, Any]:
    import torch

    states = dict.fromkeys(("full_attention", "sliding_attention"), (torch.zeros(1, 1, 8, 2),) * 2)
    return made.get_candidates(
        tokens,
        model_kwargs={},
        model_outputs=SimpleNamespace(hidden_states=(torch.zeros(1, 1, 1),), shared_kv_states=states),
        is_first_iteration=False,
        n_last_matches=0,
    )


def accept(candidate_ids: Any, logits: Any, model_logits: Any) -> Any:
    """The tokens that upstream accepts; before 5.18.0 it is also told whether the text has ended."""
    import inspect

    from transformers.generation import utils

    options = (
        {"is_done_candidate": False}
        if "is_done_candidate" in inspect.signature(utils._speculative_sampling).parameters
        else {}
    )
    return utils._speculative_sampling(
        candidate_input_ids=candidate_ids,
        candidate_logits=logits,
        candidate_length=logits.shape[1],
        new_logits=model_logits,
        **options,
    )[0]


def model_logits(table: Any, active: Any, text: Any) -> Any:
    """What the model says after each token from the end of the prompt on, processed."""
    import torch

    rows = []
    for end in range(PROMPT, text.shape[1] + 1):
        rows.append(active(text[:, :end], table[text[0, end - 1]].view(1, -1).clone()))
    return torch.stack(rows, dim=1)


def chi_square(seen: dict[Any, int], expected: dict[Any, float], rounds: int) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; results expected fewer than 5 times count as one.

    Where these are expected fewer than 5 times together, more than 20 of them are a failure.
    """
    rare = sum(probability for probability in expected.values() if probability * rounds < 5)
    cells = {key: probability for key, probability in expected.items() if probability * rounds >= 5}
    statistic = sum((seen.get(key, 0) - rounds * p) ** 2 / (rounds * p) for key, p in cells.items())
    others = rounds - sum(seen.get(key, 0) for key in cells)
    if rare * rounds >= 5:
        statistic += (others - rounds * rare) ** 2 / (rounds * rare)
        return statistic, len(cells)
    return statistic + (others > 20) * others**2, len(cells) - 1


@pytest.mark.skipif(not is_affected(PATCH), reason="this release has no assistants of Gemma 4")
@pytest.mark.parametrize(
    ("case", "drafter"),
    [
        *((case, "noisy") for case in CASES),
        *((case, drafter) for case in ("plain", "Gemma") for drafter in ("perfect", "opposed")),
    ],
)
def test_two_tokens_have_the_distribution_of_plain_sampling(case: str, drafter: str) -> None:
    """The next two tokens, which are drafts, corrections or the token after an accepted block.

    The seed is fixed. The bound is five standard deviations of chi-square.
    """
    assert deviation(case, drafter, patched=True) < 5


@pytest.mark.skipif(not is_affected(PATCH), reason="this release has no assistants of Gemma 4")
def test_the_measure_sees_upstreams_drafts() -> None:
    assert deviation("plain", "noisy", patched=False) > 20


def deviation(case: str, drafter: str, *, patched: bool) -> float:
    """How many standard deviations chi-square of the next two tokens is above its mean."""
    import torch

    torch.manual_seed(1)
    table = torch.randn(VOCABULARY, VOCABULARY) * 1.5
    tables = {"perfect": table, "noisy": table + torch.randn_like(table), "opposed": -table}
    active = processors(case)
    prompt = torch.arange(5, 5 + PROMPT).unsqueeze(0)
    expected = {}
    first = model_logits(table, active, prompt)[0, 0].softmax(-1)
    for one in range(VOCABULARY):
        if not first[one]:
            continue
        text = torch.cat([prompt, torch.tensor([[one]])], dim=1)
        for two, probability in enumerate(model_logits(table, active, text)[0, 1].softmax(-1).tolist()):
            expected[one, two] = float(first[one]) * probability
    seen: dict[Any, int] = {}
    made = generator(tables[drafter], active, patched=patched)
    for _ in range(ROUNDS):
        text = prompt
        while text.shape[1] < PROMPT + 2:
            ids, logits = candidates(made, text)
            drafted = ids[:, text.shape[1] :]
            rows = model_logits(table, active, torch.cat([text, drafted], dim=1))[:, -DRAFTS - 1 :]
            text = torch.cat([text, accept(ids, logits, rows)], dim=1)
        key = tuple(text[0, PROMPT : PROMPT + 2].tolist())
        seen[key] = seen.get(key, 0) + 1
    statistic, freedom = chi_square(seen, expected, ROUNDS)
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.skipif(not is_affected(PATCH), reason="this release has no assistants of Gemma 4")
def test_what_is_handed_on_is_what_was_drawn_from() -> None:
    """Every draft is possible under it, and a perfect assistant's drafts are all accepted."""
    import torch

    torch.manual_seed(2)
    table = torch.randn(VOCABULARY, VOCABULARY) * 2
    active, prompt = processors("top-k"), torch.arange(5, 5 + PROMPT).unsqueeze(0)
    made = generator(table, active)
    for _ in range(50):
        ids, logits = candidates(made, prompt)
        rows = model_logits(table, active, ids)
        assert torch.equal(logits, rows[:, :-1])
        assert torch.equal(accept(ids, logits, rows)[:, :DRAFTS], ids[:, PROMPT:])


@pytest.mark.skipif(not is_affected(PATCH), reason="this release has no assistants of Gemma 4")
def test_greedy_decoding_has_upstreams_drafter() -> None:
    from gemma4_compat.patches.generation import transformers_assistant_sampling as patch

    made = SimpleNamespace(generation_config=SimpleNamespace(do_sample=False), assistant_model="as it is")
    assert patch.candidate_generator(lambda *_, **__: made, None).assistant_model == "as it is"


@pytest.fixture
def assisted(workspace: Any) -> Callable[..., Any]:
    """``assisted(seed, **options)``: sampled tokens with an assistant. Releases without assistants are skipped."""
    try:
        assistant = workspace.load_assistant()
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    model = workspace.load()

    def tokens(seed: int, **options: Any) -> Any:
        import torch

        torch.manual_seed(seed)
        batch = workspace.inputs(text_only=True)
        return model.generate(**batch, assistant_model=assistant, do_sample=True, max_new_tokens=8, **options)

    return tokens


@pytest.mark.skipif(not is_affected(PATCH), reason="this release has no assistants of Gemma 4")
def test_a_seed_gives_the_same_text_again(assisted: Callable[..., Any]) -> None:
    options = {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    assert assisted(3, **options).equal(assisted(3, **options))
    assert not assisted(3, **options).equal(assisted(4, **options))
