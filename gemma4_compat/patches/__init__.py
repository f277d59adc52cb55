"""One file a patch, in a folder for each area; :mod:`registry` lists them in the order in which they are stacked.

A file holds, from top to bottom: what a user sees and why (the docstring), the replacements, ``reproduce``, and
``PATCH``, which says what is replaced in which releases. :mod:`measured` has the known code of each target, and tools
write it. The test of ``patches/AREA/NAME.py`` is ``tests/patches/AREA/test_NAME.py``. CONTRIBUTING.md says how to add
one.
"""
