"""A randomized search over placements; see ``case.py`` (what is tried), ``run.py`` (what must hold)."""
