"""The shim beside libraries that patch the same classes: the same actions in four processes, and one table.

``stacks``: which library, in which releases. ``others``: how each is imported and turned on. ``actions``: what a
process does with a tiny model. ``child``: one process. ``verdicts``: what a cell says. ``command``: all of it.
"""
