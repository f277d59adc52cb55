"""Offloaded modules: how their weights are stored, copied, looked up, loaded, saved and tied.

Called by the patches of :mod:`gemma4_compat.patches.offload`, which install hooks when accelerate dispatches a model:
``accelerate_paged_layers`` (streaming, idle hooks, the lock), ``accelerate_embedding_lookup`` (rows),
``accelerate_load_offloaded`` and ``accelerate_save_state_offloaded`` (state dicts), ``accelerate_remove_hooks``
(undoing). PEFT's side comes from ``peft_keep_dispatch`` and ``peft_merge_offloaded``.

While a model runs:

* :mod:`streaming`: each layer is copied to the device while the layer before it computes. It waits in
  ``LayerStreamer._require`` (forward) and ``_backward_begins``, through :meth:`copy_stream.CopyStream.wait_for_copy`.
* :mod:`module_groups`, :mod:`group_weights`: the tensors of one layer, packed into one buffer.
* :mod:`copy_stream`: the stream for these copies. :mod:`read_ahead`: requests rows of a file before they are copied.
* :mod:`row_lookup`: an offloaded embedding reads only the rows it needs. :mod:`expert_lookup`: the same for experts.
* :mod:`idle_hooks`: bypasses accelerate's hooks that have nothing to do.
* :mod:`model_lock`: one thread at a time. :mod:`torch_internals`: the private torch interfaces for all of this.

Where weights are:

* :mod:`host_memory`: one offloaded weight, in memory or on disk. :mod:`host_room`: is there enough room, before a
  load?
* :mod:`stored_weights`: reading and replacing them. :mod:`stored_state`, :mod:`state_loading`: state dicts.
* :mod:`tied_pairs`, :mod:`tied_weights`, :mod:`joined_weights`: weights that share one parameter on one device.
* :mod:`gathered_weights`: offloaded modules that temporarily have their weights.
* :mod:`parametrized`: weights that were parametrized while they were offloaded.

Adapters:

* :mod:`peft_layers`: PEFT on offloaded layers. :mod:`dispatched_adapters`: a model dispatched after its adapters.
* :mod:`merged_layers`: merging and unmerging.
"""

from __future__ import annotations
