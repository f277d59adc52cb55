"""Tools for saved adapters, and for the checkpoints that they belong to.

* :mod:`scan`: what an adapter is, and what it would do on a base. :mod:`merge`: an adapter merged into its base.
* :mod:`export`: an adapter for another reader. :mod:`repair`: a checkpoint that lacks weights or files, completed.
* :mod:`base`: what scan and export read of a base.
"""
