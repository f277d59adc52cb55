"""Offloaded modules: how their weights are stored, copied, looked up, loaded, saved and tied.

Called by the patches of :mod:`gemma4_compat.patches.offload`, which install hooks when accelerate dispatches a model:
``accelerate_paged_layers`` (streaming, idle hooks, the lock), ``accelerate_embedding_lookup`` (rows),
``accelerate_load_offloaded`` and ``accelerate_save_state_offloaded`` (state dicts), ``accelerate_remove_hooks``
(undoing). PEFT's side comes from ``peft_keep_dispatch`` and ``peft_merge_offloaded``.

* :mod:`transfer`: what is copied while a model runs. :mod:`weights`: the weights themselves.
* :mod:`host_memory`: one offloaded weight, in memory or on disk. :mod:`host_room`: is there room, before a load?
* :mod:`model_lock`: one thread at a time. :mod:`torch_internals`: the private torch interfaces for all of this.
"""

from __future__ import annotations
