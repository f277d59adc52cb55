"""``python -m tests.generated.search.differential``."""

import sys

from tests.generated.search.differential.cli import main

if __name__ == "__main__":
    sys.exit(main())
