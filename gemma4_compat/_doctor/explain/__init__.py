"""The command ``explain``: which patch an error belongs to.

* :mod:`messages` reads the text. :mod:`search` finds patches, by ``places.json`` among others. :mod:`answers` words
  what was found, and :mod:`explanation` is what the user gets.
* :mod:`common_errors`: errors that no patch is about. :mod:`imports`: a library that is missing, or does not match
  torch.
"""
