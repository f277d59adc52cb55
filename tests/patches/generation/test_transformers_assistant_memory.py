"""What an assisted ``generate`` keeps of the prompt (F87)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gemma4_compat.patches.generation.transformers_assistant_memory import PATCH
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"\d+ hidden states are kept of a prompt of 24 tokens"
    exact = False


@pytest.fixture
def pair(workspace: Any) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its assistant and a prompt, in float32; skips where there is no assistant."""
    if not is_affected(PATCH):
        pytest.skip("this release has no assistants of Gemma 4")
    try:
        assistant = workspace.load_assistant()
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    return workspace.load().float(), assistant.float(), workspace.inputs(text_only=True)


def generate(model: Any, assistant: Any, batch: dict[str, Any], **options: Any) -> Any:
    return model.generate(**batch, assistant_model=assistant, max_new_tokens=8, do_sample=False, **options)


def test_the_assistant_reads_the_states_that_upstream_hands_on(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to rounding: a caller who wants the hidden states of all layers gets them, as upstream's assistants do."""
    import torch

    from gemma4_compat._lab import assistants

    model, assistant, batch = pair
    read: list[list[Any]] = []
    for options in ({}, {"output_hidden_states": True, "return_dict_in_generate": True}):
        calls, handle = assistants.calls(assistant)
        generate(model, assistant, batch, **options)
        handle.remove()
        read.append([call["inputs_embeds"] for call in calls])
    assert len(read[0]) == len(read[1]) > 3
    for ours, upstreams in zip(*read):
        torch.testing.assert_close(ours, upstreams, atol=1e-4, rtol=1e-4)


def test_hidden_states_that_the_caller_asked_for_are_those_of_all_layers(pair: Any) -> None:
    model, assistant, batch = pair
    found = generate(model, assistant, batch, output_hidden_states=True, return_dict_in_generate=True)
    assert len(found.hidden_states[0]) == model.config.get_text_config().num_hidden_layers + 1
    assert generate(model, assistant, batch, return_dict_in_generate=True).hidden_states is None


def test_nothing_stays_on_the_model_also_after_an_error(pair: Any) -> None:
    model, assistant, batch = pair
    before = (len(model._forward_hooks), len(model._forward_pre_hooks), len(model.lm_head._forward_pre_hooks))
    generate(model, assistant, batch)
    twice = {name: value.repeat(2, 1) for name, value in batch.items()}
    with pytest.raises(ValueError, match="batch_size = 1"):
        generate(model, assistant, twice)
    after = (len(model._forward_hooks), len(model._forward_pre_hooks), len(model.lm_head._forward_pre_hooks))
    assert after == before


def test_two_threads_share_a_model(pair: Any) -> None:
    model, assistant, batch = pair
    other = {name: value.flip(1) for name, value in batch.items()}
    expected = [generate(model, assistant, one).tolist() for one in (batch, other)]
    found: dict[int, Any] = {}

    def run(index: int, one: dict[str, Any]) -> None:
        found[index] = generate(model, assistant, one).tolist()

    threads = [threading.Thread(target=run, args=item) for item in enumerate((batch, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == expected
