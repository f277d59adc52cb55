"""A model that answers over HTTP or in a terminal: ``gemma4-compat serve`` and ``chat``, imported by these commands.

The HTTP server is transformers' own (``transformers.cli.serving``), with a model of ours. One thread generates, one
answer after the other or several together; all others wait, and every wait has a limit.

* :mod:`loading`: the model as its plan says, its adapters by name, its assistant.
* :mod:`requests`: what a request may ask for, and how it is refused. :mod:`media`: its images and sounds.
* :mod:`answers`: prompts, generation, stop texts; the thread and its queue. :mod:`together`: several at a time.
* :mod:`warm_up`: what is done before the first request.
* :mod:`server`: routes, keys, limits. :mod:`terminal`: a chat.
"""

from __future__ import annotations
