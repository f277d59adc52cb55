"""Layers and rows that are copied to the device while the model runs.

* :mod:`streaming`: each layer is copied while the layer before it computes. It waits in ``LayerStreamer._require``
  (forward) and ``_backward_begins``, through :meth:`copy_stream.CopyStream.wait_for_copy`.
* :mod:`module_groups`, :mod:`group_weights`: the tensors of one layer, packed into one buffer.
* :mod:`copy_stream`: the stream for these copies. :mod:`read_ahead`: requests rows of a file before they are copied.
* :mod:`row_lookup`: an offloaded embedding reads only the rows it needs, and the head tied to it reads its weight in
  place. :mod:`expert_lookup`: the former for experts.
* :mod:`idle_hooks`: bypasses accelerate's hooks that have nothing to do.
* :mod:`parametrized`: weights that were parametrized while they were offloaded.
"""

from __future__ import annotations
