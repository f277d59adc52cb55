"""Training steps of short sequences: what each decoder layer does in a step is captured, and replayed.

``train_fast`` (:mod:`fast`) puts a forward on each decoder layer. In a training step it replays two CUDA graphs: the
layer's forward, and its backward pass, which computes the layer again first, as checkpointing does.

* :mod:`fast`: :func:`gemma4_compat.train_fast`. :mod:`parts`: what it turns on besides graphs. :mod:`room`: whether
  memory asks for MLPs in pieces.
* :mod:`layers`: the forward on a layer: whether this call is replayed, captured or left to the layer.
* :mod:`calls`: one call of a layer: its tensors apart from everything else, and the same call with other tensors.
* :mod:`counting`: what the graphs of a model keep, for plans.
* :mod:`graphs`: both graphs of a layer, and the autograd function that replays them.
"""

from __future__ import annotations
