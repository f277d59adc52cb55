"""The same small case in every interpreter, mode and packaging: `python -m tests.world.interpreters`."""
