"""What takes longer than a second says so, once, on a terminal and in the log."""

from __future__ import annotations

import logging
import sys
import threading
import time

import pytest

from gemma4_compat._engine.io import terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_takes_long_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    *,
    is_terminal: bool,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(terminal, "SOON", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    with terminal.explained("compiling"):
        for _ in range(200):
            time.sleep(0.01)
            if caplog.records:
                break
        time.sleep(0.02)
    assert [record.message for record in caplog.records] == ["gemma4_compat: compiling"]
    assert capsys.readouterr().err == "gemma4_compat: compiling\n" * is_terminal


def test_what_is_quick_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    before = threading.active_count()
    for _ in range(3):
        with terminal.explained("compiling"):
            pass
    with pytest.raises(ValueError, match="wrong"), terminal.explained("compiling"):
        raise ValueError("wrong")
    for _ in range(100):
        if threading.active_count() == before:
            break
        time.sleep(0.01)
    assert threading.active_count() == before
    assert not caplog.records
