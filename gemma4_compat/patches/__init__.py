"""One file a patch, in a folder for each area; :mod:`registry` orders those that replace the same functions.

A file holds, from top to bottom: what a user sees and why (the docstring), ``PATCH``, which says what is affected, the
replacements, each under what it replaces, and ``reproduce``. :mod:`api` is what it is written with. ``measured.json``
has the known code of each target, and tools write it. The test of ``patches/AREA/NAME.py`` is
``tests/patches/AREA/test_NAME.py``. CONTRIBUTING.md says how to add one.
"""
