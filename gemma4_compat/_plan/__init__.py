"""Device maps that fit, and the code that loads a model so: a tool, which patches nothing.

Called by ``gemma4_compat.plan_device_map`` and ``plan_training``, and by their commands. What a forward needs, and
which block goes where, is in ``_memory``.

* :mod:`plan`, :mod:`training`: the two entry points. :mod:`requests`: what is asked for, and what is refused before
  torch is imported. :mod:`result`: what they return.
* :mod:`budgets`: the memory to plan for.
* :mod:`training_step`: a step's memory, counted by running one, with some layers of each kind (:mod:`equal_layers`),
  on a model without memory (:mod:`fake_model`). :mod:`switches`: which of its options a training plan chooses.
* :mod:`prompt_kernels`: whether attention of prompts is counted without the copies that PyTorch makes.
* :mod:`assistants`: what an assistant takes, and its speculative steps.
* :mod:`speed`: tokens per second on a card, from a model. :mod:`cards`: as somebody measured them.
* :mod:`text`, :mod:`code`: a plan as text and as Python.
"""
