"""The commands that run what patches repair: ``doctor`` and ``reproduce``.

* ``doctor``: :mod:`diagnosis`, :mod:`findings`, :mod:`text`. ``doctor --show`` asks the trained model: :mod:`show`,
  :mod:`scenes`.
* Children run the reproductions: :mod:`children`, :mod:`server`, :mod:`child`.
* ``reproduce`` prints a script: :mod:`script`.
"""
