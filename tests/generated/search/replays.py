"""``python -m tests.generated.search.replays``. The workers of a pool cannot import what is defined here."""

import sys

from tests.generated.search.replays_cli import main

if __name__ == "__main__":
    sys.exit(main())
