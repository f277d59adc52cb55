"""Hostile inputs for every reader and command: ``python -m tests.fuzz --help`` and docs/FUZZING.md."""
