"""The command ``doctor``: reproductions in child processes, and the verdicts."""
