"""The generated parts of the documentation, a module a subject.

``python tools/docs.py`` writes what comes from the registry and from committed measurements: ``patches`` (each patch),
``matrix``, ``gpu``, ``quantization``, ``measurements``. The tables of ``caches``, ``dialects``, ``experts`` and
``tuners`` are data that tests try row by row; each is written by its own command, such as
``python -m tools.pages.caches``.
"""
