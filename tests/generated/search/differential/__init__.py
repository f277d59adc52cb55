"""A differential search: what people call on a model, without the package and with it.

See ``table.py`` (what a call is), ``server.py`` (how it runs), ``verdict.py`` (what is worse).
"""
