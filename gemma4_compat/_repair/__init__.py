"""Checkpoints that lack weights or files, completed."""

from __future__ import annotations
