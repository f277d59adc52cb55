"""A guest does not chatter: what this package says in one plain run is five lines at most."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatWarning
from gemma4_compat._lab import tiny
from gemma4_compat._offload.weights import stored_weights
from tests.patches.training.parts import only

pytestmark = pytest.mark.full

MOST = 5
_PACKAGE = str(Path(gemma4_compat.__file__).parent)


@contextlib.contextmanager
def heard(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[list[str]]:
    """What this package warns of (each time), logs where a program shows it, or writes; and the 8-bit layers' line."""
    lines: list[str] = []
    caplog.clear()
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        yield lines
    own = [one for one in caught if one.category is Gemma4CompatWarning or one.filename.startswith(_PACKAGE)]
    lines += [str(one.message) for one in own]
    logged = [one for one in caplog.records if one.levelno >= logging.WARNING]
    names = ("gemma4_compat", "bitsandbytes")
    lines += [one.getMessage() for one in logged if one.name.startswith(names) or one.pathname.startswith(_PACKAGE)]
    written = "".join(capfd.readouterr()).splitlines()
    lines += [line for line in written if "gemma4_compat" in line and line not in lines]


def generate(workspace: Any, model: Any) -> None:
    for batch in (workspace.inputs(), workspace.inputs(text_only=True)):
        for _ in range(3):
            model.eval().generate(**batch, max_new_tokens=4, do_sample=False)


def train(workspace: Any, model: Any) -> None:
    for text_only in (True, False, True):
        batch = workspace.inputs(text_only=text_only)
        model.train()(**batch, labels=batch["input_ids"]).loss.backward()


def decode_fast(workspace: Any, model: Any) -> None:
    generate(workspace, gemma4_compat.decode_fast(model))


def chunked_loss(workspace: Any, model: Any) -> None:
    train(workspace, only(model, loss=True))


def chunked_mlp(workspace: Any, model: Any) -> None:
    train(workspace, only(model, mlp=7))


def train_fast(workspace: Any, model: Any) -> None:
    train(workspace, gemma4_compat.train_fast(model))


USES: list[Callable[[Any, Any], None]] = [generate, train, decode_fast, chunked_loss, chunked_mlp, train_fast]


@pytest.mark.parametrize("adapter", [None, "language", "all"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_loading_generating_and_training(
    workspace: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    quantization: str | None,
    split: bool,
    adapter: str | None,
) -> None:
    from peft import PeftModel

    for use in USES:
        if adapter is None and use in (train, chunked_loss, chunked_mlp, train_fast) and (split or quantization):
            continue  # these weights are not trained
        with heard(caplog, capfd) as lines:
            model = tiny.load(workspace.checkpoint, quantization, device=workspace.main)
            model = workspace.dispatch(model) if split else model
            if adapter is not None:
                model = PeftModel.from_pretrained(model, workspace.adapter(adapter), is_trainable=True)
            use(workspace, model)
        assert len(lines) <= MOST, (use.__name__, lines)


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_merging_into_weights_on_disk(
    workspace: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    quantization: str | None,
) -> None:
    """Each is changed, and none can be written where the checkpoint is."""
    from peft import PeftModel

    monkeypatch.setattr(stored_weights, "_said", set())
    with heard(caplog, capfd) as lines:
        if quantization is None:
            placement = tiny.device_map(workspace.load(), "both", main="cpu", offloaded="disk")
            model = tiny.load(workspace.checkpoint, device_map=placement)
        else:
            model = workspace.split(quantization)
        model = PeftModel.from_pretrained(model, workspace.adapter("language"))
        generate(workspace, model.merge_and_unload())
    assert len(lines) <= MOST, lines
