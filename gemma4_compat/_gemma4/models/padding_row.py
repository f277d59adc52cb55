"""The row of the padding token, which ``Gemma4Model.forward`` reads from the weight of the token embedding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def between_forwards(outermost: Any, embedding: Any, row: Any) -> Iterator[None]:
    """Inside, whenever the embedding is not in its forward, each row of its weight reads as ``row``.

    The forward of the ``outermost`` layer around it has the real weight: an adapter may need it (DoRA).

    Args:
        outermost: the embedding, or an adapter's layer around it.
        embedding: an ``nn.Embedding`` whose weight is its own parameter.
        row: (hidden,), on the device where it is used.
    """
    import torch

    between = embedding.weight
    stand_in = torch.nn.Parameter(row.expand(between.shape), requires_grad=False)

    def put_stand_in(*_: Any) -> None:
        nonlocal between
        if embedding.weight is not stand_in:
            between = embedding.weight
        embedding._parameters["weight"] = stand_in

    def remove_stand_in(*_: Any) -> None:
        embedding._parameters["weight"] = between

    put_stand_in()
    # Around accelerate's hook, which runs inside `forward` and must not see the stand-in: it remembers addresses.
    before = outermost.register_forward_pre_hook(remove_stand_in, prepend=True)
    try:
        with before, outermost.register_forward_hook(put_stand_in):
            yield
    finally:
        if embedding.weight is stand_in:
            remove_stand_in()
