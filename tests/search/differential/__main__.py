"""``python -m tests.search.differential``."""

import sys

from tests.search.differential.cli import main

if __name__ == "__main__":
    sys.exit(main())
