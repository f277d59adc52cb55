"""The box on the site's page "Find the error" (docs/errors.js) answers as ``gemma4-compat explain`` does."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._doctor.explain import messages, search
from tests.helpers import ROOT
from tests.unit.doctor.explain import pasting
from tools import pasted_errors
from tools.pages import errors_box

ERRORS = pasted_errors.read()
PATCHES = gemma4_compat.patches()
_HERE = ROOT / "tests" / "unit" / "doctor" / "explain"
SAMPLES, THREADS = (
    json.loads((_HERE / name).read_text("utf-8")) for name in ("common_samples.json", "thread_errors.json")
)
#: Errors that no patch is about, and texts without an error.
OTHERS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.62 GiB",
    "ValueError: The checkpoint you are trying to load has model type `gemma4` but Transformers does not recognize it",
    "OSError: google/gemma-4-E4B-it is a gated repo",
    "ZeroDivisionError: division by zero",
    "KeyError: 3",
    "KeyError: 'base_model.model.model.model.audio_tower.layers.0.feed_forward1.ffw_layer_1'",
    "hello",
    "17",
    " ",
)


@functools.cache
def answers() -> list[dict[str, Any]]:
    """What the box says of every text of :func:`texts`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js: apt-get install nodejs")
    program = (
        f"const explain = require({json.dumps(str(ROOT / 'docs' / 'errors.js'))});"
        "const {known, texts} = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "console.log(JSON.stringify(texts.map(text => explain(text, known))));"
    )
    given = json.dumps({"known": errors_box.known(), "texts": texts()})
    done = subprocess.run([node, "-e", program], input=given, capture_output=True, text=True, check=True, timeout=120)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@functools.cache
def texts() -> list[str]:
    """Each pasted error in two ways of twelve, taken in turn."""
    styles = list(pasting.STYLES.values())
    pasted = [styles[(2 * at + add) % len(styles)](one) for at, one in enumerate(ERRORS) for add in (0, 1)]
    return [*pasted, *OTHERS, *("\n".join(one["text"]) for one in SAMPLES + THREADS)]


def test_it_answers_as_explain_does() -> None:
    differing = []
    for text, answer in zip(texts(), answers()):
        found = _answer(text).matches
        if [(one.patch.id, one.certain) for one in found] != [
            (one["id"], one["certain"]) for one in answer["matches"]
        ]:
            differing.append((text[-200:], [one.patch.id for one in found], [one["id"] for one in answer["matches"]]))
    assert len(texts()) > 140
    assert differing == []


def test_it_has_the_advice_on_common_errors() -> None:
    for text, answer in zip(texts(), answers()):
        known = _answer(text).advice
        assert answer["advice"] == (None if known is None else json.loads(json.dumps(known._asdict()))), text
    assert sum(answer["advice"] is not None for answer in answers()) >= 100


def _answer(text: str) -> search.Answer:
    said = messages.read(text)
    return search.answer(said, PATCHES) if said.messages else search.Answer(())


def test_a_silent_failure_is_found_by_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.texts", lambda: ["the quantized model sees grey in images"])
    (grey,) = answers.__wrapped__()
    assert grey["matches"][0]["id"] == "transformers-quantized-vision"


def test_other_words_find_what_is_described_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.texts", lambda: ["the audio tower attends to the padding with eager attention"])
    (audio,) = answers.__wrapped__()
    assert audio["matches"] == []
    assert audio["described"][0]["id"] == "transformers-audio-mask"
