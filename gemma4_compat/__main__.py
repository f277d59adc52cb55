"""``python -m gemma4_compat`` is the ``gemma4-compat`` command."""

from gemma4_compat.cli import main

if __name__ == "__main__":
    main()
