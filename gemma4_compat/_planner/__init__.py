"""Device maps that fit: the bytes of each block, its place, and the code that loads the model.

Called by ``gemma4_compat.plan_device_map`` and ``plan_training``, by their commands, and by ``device_map="auto"``
(``patches/placement/transformers_auto_map.py``).

* :mod:`plan`, :mod:`training`: the two entry points. :mod:`result`: what they return.
* :mod:`budgets`: the memory to plan for.
* :mod:`blueprint`: a model's blocks and their bytes. :mod:`upstream`: what differs between releases.
* :mod:`memory`: the KV cache and a forward's temporaries. :mod:`training_step`: a step's, counted by running one, with
  some layers of each kind (:mod:`equal_layers`). :mod:`switches`: which of its options a training plan chooses.
* :mod:`use`: the sum for one accelerator; ``Use.peak`` is a plan's peak. :mod:`layout`: which block goes where.
* :mod:`reading`: how many tokens of a prompt fit at a time, also for ``transformers_graph_decoding``.
  :mod:`prompt_kernels`: whether its attention is counted without the copies that PyTorch makes.
* :mod:`assistants`: what an assistant takes, and rounds with its drafts.
* :mod:`speed`: tokens per second on a card, from a model. :mod:`measured`: as somebody measured them; the form of such
  a report is :mod:`card_report`.
* :mod:`text`, :mod:`training_text`, :mod:`code`, :mod:`training_code`: a plan as text and as Python.
"""

from __future__ import annotations
