"""Several answers at a time: the text of each is that of an idle server that writes one after the other."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._lab.trained import Trained
from tests.unit.commands import serving
from tests.unit.commands.serving import QUESTIONS, Server

if any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "fastapi", "openai", "uvicorn")):
    pytest.skip("needs the upstream libraries and the extra [serve]: pip install '.[test]'", allow_module_level=True)
if not versions.admits(">=5.15", versions.installed("transformers") or "0"):
    pytest.skip("serve needs transformers 5.15 or newer", allow_module_level=True)


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """After ``decode_fast``, with stand-ins for CUDA graphs and for kernels that compute each row as if it were alone."""
    import gemma4_compat
    from gemma4_compat._graphs.recording import RECORDERS
    from gemma4_compat._kernels.match import custom
    from gemma4_compat._lab.stand_ins import tape
    from tests.unit.kernels.by_rows import ByWidth

    found = serving.load(Trained.find())
    with pytest.MonkeyPatch.context() as patched, tape.standing_in(RECORDERS):
        patched.setattr(custom, "CustomKernels", ByWidth)
        patched.setattr(custom, "unsupported_reason", lambda _device: None)
        gemma4_compat.decode_fast(found.model, any_length=True, reuse_prefix=True)
        yield found
        gemma4_compat.decode_fast(found.model, enabled=False)


@pytest.fixture(scope="module")
def alone(served: Any) -> Iterator[Server]:
    with serving.running(served) as found:
        yield found


@pytest.fixture(scope="module")
def server(served: Any) -> Iterator[Server]:
    with serving.running(served, parallel=4) as found:
        yield found


def asked(index: int) -> tuple[str, dict[str, Any]]:
    """A question and its options: greedy or sampled, of a few lengths, to the model or its pirate."""
    options: dict[str, Any] = {"max_tokens": 4 + 9 * (index % 4), "model": ("model", "pirate")[index // 5 % 2]}
    if index % 3 == 1:
        options |= {"temperature": 0.9, "seed": index, "top_p": (None, 0.8)[index % 2]}
    if index % 6 == 5:
        options["extra_body"] = {"repetition_penalty": 1.2}
    return QUESTIONS[(3 * index + index // 8) % len(QUESTIONS)], {k: v for k, v in options.items() if v is not None}


def answer(server: Server, index: int, *, streamed: bool = False) -> str:
    question, options = asked(index)
    options = {"temperature": 0, **options}
    made = server.client().chat.completions.create(messages=serving.turns(question), stream=streamed, **options)
    if not streamed:
        return str(made.choices[0].message.content)
    return "".join(part.choices[0].delta.content or "" for part in made)


@pytest.mark.parametrize("clients", [1, 4, 16])
def test_each_text_is_that_of_the_request_alone(alone: Server, server: Server, clients: int) -> None:
    expected = [answer(alone, index) for index in range(clients)]

    def late(index: int) -> str:
        time.sleep(0.03 * (index % 5))
        return answer(server, index, streamed=bool(index % 2))

    with ThreadPoolExecutor(clients) as pool:
        assert list(pool.map(late, range(clients))) == expected
