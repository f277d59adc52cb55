"""``python -m tests.generated.fuzz``."""

from tests.generated.fuzz.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
