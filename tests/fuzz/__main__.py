"""``python -m tests.fuzz``."""

from tests.fuzz.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
