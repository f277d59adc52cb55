"""The command ``explain``: which patch an error or a symptom belongs to, or what else to do.

* :mod:`messages` reads the text. :mod:`search` finds patches, by ``places.json`` among others. :mod:`answers` words
  what was found, and :mod:`explanation` is what the user gets.
* :mod:`common_errors`: errors of any program and of other software, and symptoms in words, from
  ``common_errors.json``. :mod:`imports`: a library that is missing, or does not match torch.
"""
