"""What an assistant model reads (F86): the keys, values and hidden states of accepted tokens, and all of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat.patches.generation.transformers_assistant_keys import PATCH, accepted
from tests.conftest import is_affected
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"\d+ of \d+ keys in (sliding|full)_attention are those of rejected tokens"
    exact = False


@pytest.mark.parametrize(("candidates", "matches"), [(0, 0), (3, 0), (3, 2), (3, 3)])
def test_as_many_are_cut_as_were_rejected(candidates: int, matches: int) -> None:
    import torch

    rows = candidates + 1
    full, sliding = torch.arange(20.0).view(1, 1, 20, 1), torch.arange(9.0, 20).view(1, 1, 11, 1)
    hidden = (None, torch.arange(20.0).view(1, 20, 1)[:, -rows:])
    states = {"full_attention": (full, full + 1), "sliding_attention": (sliding, sliding + 1)}
    found = accepted(SimpleNamespace(hidden_states=hidden, shared_kv_states=states), candidates, matches)
    end = 20 - (candidates - matches)
    for kind, start in (("full_attention", 0), ("sliding_attention", 9)):
        keys, values = found.shared_kv_states[kind]
        assert keys.flatten().tolist() == list(range(start, end))
        assert torch.equal(values, keys + 1)
    # Upstream takes row `matches`: that of the last accepted token.
    assert float(found.hidden_states[-1][0, matches]) == end - 1


def test_after_the_prompt_the_newest_row_is_left() -> None:
    """Before 5.18.0 upstream takes the first row here, and newer releases take the last."""
    import torch

    states = {"full_attention": (torch.zeros(1, 1, 20, 1),) * 2}
    prompt = SimpleNamespace(hidden_states=(torch.arange(20.0).view(1, 20, 1),), shared_kv_states=states)
    assert accepted(prompt, 0, 0).hidden_states[-1].flatten().tolist() == [19.0]


def test_outputs_that_lack_something_are_upstreams_to_refuse() -> None:
    for outputs in (None, SimpleNamespace(hidden_states=None, shared_kv_states={}), SimpleNamespace(hidden_states=())):
        assert accepted(outputs, 3, 0) is outputs


@pytest.mark.skipif(not is_affected(PATCH), reason="this release has no assistants of Gemma 4")
@pytest.mark.parametrize("schedule", ["heuristic", "constant"])
def test_keys_and_order_are_those_of_a_fresh_forward(workspace: Any, schedule: str) -> None:
    import torch

    from gemma4_compat._lab import assistants

    try:
        assistant = workspace.load_assistant().float()
    except (ImportError, ValueError) as error:
        pytest.skip(str(error))
    assistant.generation_config.num_assistant_tokens_schedule = schedule
    model = workspace.load().float()
    calls, handle = assistants.calls(assistant)
    batch = workspace.inputs(text_only=True)
    tokens = model.generate(**batch, assistant_model=assistant, max_new_tokens=10, do_sample=False)
    handle.remove()
    assert len(calls) > 5
    for call in calls:
        expected = assistants.of_accepted(model, tokens, call)
        for kind, (keys, _) in call["shared_kv_states"].items():
            torch.testing.assert_close(keys, expected[kind][:, :, -keys.shape[2] :], atol=1e-4, rtol=1e-4)
        assert call["shared_kv_states"]["full_attention"][0].shape[2] == int(call["position_ids"])
