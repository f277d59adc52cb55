"""EleutherAI's lm-evaluation-harness: ``HFLM`` with a model object."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.world.clients import models

pytest.importorskip("lm_eval", reason="needs lm_eval: nox -s clients")

QUESTIONS = [("What is one and two?", ["one", "two", "three"], 2), ("A cat says", ["woof", "meow"], 1)]


def evaluated(model: Any, processor: Any, data: Path) -> Any:
    """Scores of a task of choices and one of free answers, with every number that they come from."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(data.parent / "cache")},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choices = {"doc_to_target": "{{answer}}", "doc_to_choice": "{{choices}}", "output_type": "multiple_choice"}
    answers = {
        "doc_to_target": "{{choices[answer]}}",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    perplexity = {"doc_to_text": "", "doc_to_target": "{{question}}", "output_type": "loglikelihood_rolling"}
    perplexity["metric_list"] = [{"metric": "word_perplexity"}]  # type: ignore[assignment]
    tasks = [
        {"task": name, **common, **kind}
        for name, kind in (("choices", choices), ("answers", answers), ("perplexity", perplexity))
    ]
    harness = HFLM(pretrained=model, tokenizer=processor.tokenizer, batch_size=2, max_length=128)
    assert harness.device == model.device
    found = lm_eval.simple_evaluate(
        model=harness, tasks=tasks, task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )
    responses = {name: [one["resps"] for one in samples] for name, samples in found["samples"].items()}
    return found["results"], responses


@pytest.fixture
def data(tmp_path: Path) -> Path:
    lines = [json.dumps({"question": text, "choices": found, "answer": right}) for text, found, right in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "questions.jsonl"


def plain(model: Any, _workspace: Any) -> Any:
    return model


def adapter(model: Any, workspace: Any) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, workspace.adapter("all"))


def more_tokens(model: Any, _workspace: Any) -> Any:
    import torch

    torch.manual_seed(7)  # for the new rows
    model.resize_token_embeddings(model.config.get_text_config().vocab_size + 8, mean_resizing=False)
    return model


@pytest.mark.parametrize("given", [plain, adapter])
def test_every_score_is_that_of_one_device(
    workspace: Any, whole: Any, split: Any, processor: Any, data: Path, given: Callable[..., Any]
) -> None:
    expected, found = (evaluated(given(load(), workspace), processor, data) for load in (whole, split))
    assert found == expected
    assert len(found[1]["choices"]) == len(QUESTIONS)


@pytest.mark.parametrize("placement", models.PLACEMENTS[:2])
def test_with_added_tokens(workspace: Any, whole: Any, processor: Any, data: Path, placement: str) -> None:
    expected = evaluated(more_tokens(whole(), workspace), processor, data)
    assert evaluated(more_tokens(models.split(workspace, placement), workspace), processor, data) == expected
