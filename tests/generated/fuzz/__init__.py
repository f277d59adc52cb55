"""Hostile inputs for every reader and command: ``python -m tests.generated.fuzz --help`` and docs/FUZZING.md."""
