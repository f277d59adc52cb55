"""transformers' processors and criteria, called faster: the same values, and nobody else's are touched."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers.generation import logits_process, stopping_criteria

from gemma4_compat._generation.sampling import fast_processors

torch = pytest.importorskip("torch")

VOCABULARY, PROMPT = 16, 3


def quick(**given: Any) -> Any:
    (found,) = fast_processors.quickened(given).values()
    return found


def ids(length: int, rows: int = 3) -> Any:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("ends", [[5], [5, 2, 9]])
def test_processors(ends: list[int]) -> None:
    tensor = torch.tensor(ends)
    own = logits_process.LogitsProcessorList(
        [
            logits_process.MinLengthLogitsProcessor(6, tensor),
            logits_process.MinNewTokensLengthLogitsProcessor(PROMPT, 5, tensor),
            logits_process.RepetitionPenaltyLogitsProcessor(1.5),
            logits_process.TemperatureLogitsWarper(0.7),
            logits_process.TopPLogitsWarper(0.9),
        ]
    )
    called = quick(logits_processor=own)
    assert list(called) == list(own)
    for length in range(PROMPT, 12):
        scores = torch.randn(3, VOCABULARY)
        scores[0, 0], scores[1, 5] = float("nan"), float("inf")
        given = scores.clone()
        found, expected = called(ids(length), scores), own(ids(length), given.clone())
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert torch.equal(scores.nan_to_num(7.0), given.nan_to_num(7.0))
        assert found.data_ptr() != scores.data_ptr()


@pytest.mark.parametrize("ends", [[5], [5, 2, 9], []])
@pytest.mark.parametrize("positions", [None, 4])
def test_criteria(ends: list[int], positions: int | None, caplog: pytest.LogCaptureFixture) -> None:
    limit = stopping_criteria.MaxLengthCriteria(9, max_position_embeddings=positions)
    for members in ([limit], [limit, stopping_criteria.EosTokenCriteria(torch.tensor(ends, dtype=torch.long))]):
        members += [stopping_criteria.MaxTimeCriteria(600.0)]
        for count in (len(members) - 1, len(members)):
            own = stopping_criteria.StoppingCriteriaList(members[:count])
            called = quick(stopping_criteria=own)
            assert called.max_length == own.max_length == 9
            assert list(called) == list(own)
            for length in range(1, 12):
                found, expected = called(ids(length), None), own(ids(length), None)
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert torch.equal(found, expected)


def test_a_friendly_reminder_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", warned.append)
    limit = stopping_criteria.MaxLengthCriteria(9, max_position_embeddings=4)
    called = quick(stopping_criteria=stopping_criteria.StoppingCriteriaList([limit]))
    called(ids(4), None)
    assert not warned
    called(ids(5), None)
    assert "4" in warned[0]


def test_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(stopping_criteria.EosTokenCriteria):  # type: ignore[misc]
        pass

    class Two(logits_process.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, ids: Any, scores: Any, more: Any) -> Any:
            return scores

    processors, criteria = logits_process.LogitsProcessorList, stopping_criteria.StoppingCriteriaList
    assert not fast_processors.quickened(
        {"stopping_criteria": criteria([Own(5)]), "logits_processor": processors([Two()])}
    )
    assert not fast_processors.quickened({"stopping_criteria": [], "logits_processor": None})
    given = {"stopping_criteria": criteria([stopping_criteria.EosTokenCriteria(5)])}
    assert fast_processors.quickened(given)
    ask = stopping_criteria.EosTokenCriteria.__call__
    monkeypatch.setattr(stopping_criteria.EosTokenCriteria, "__call__", lambda *args: ask(*args))
    assert not fast_processors.quickened(given)
