"""``python -m tests.generated.search``. The workers of a pool cannot import what is defined here, so it is in
``cli.py``.
"""

import sys

from tests.generated.search.cli import main

if __name__ == "__main__":
    sys.exit(main())
