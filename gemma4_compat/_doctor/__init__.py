"""Help for a user: what is broken here, which patch an error belongs to, whether a model fits, and starting programs.

* :mod:`explain`: which patch an error belongs to. :mod:`reproductions`: ``doctor`` and ``reproduce``.
* :mod:`check`: the whole stack with the user's own model. :mod:`launch`: ``run``, ``enable`` and ``disable``.
* :mod:`environment`: ``env``, which describes the machine. :mod:`statistics`: :func:`gemma4_compat.statistics`.
* :mod:`processes`: child processes of doctor and check.
"""
