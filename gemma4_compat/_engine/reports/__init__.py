"""Patches' states: :mod:`record` (one patch in this process), :mod:`words` (verdicts), :mod:`report` (text and JSON),
:mod:`outbox` (messages, until the engine's lock is released).
"""

from __future__ import annotations
