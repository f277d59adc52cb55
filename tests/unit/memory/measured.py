"""What a cache and a forward really hold, and what is planned for a cache, for the tests of the planner."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from gemma4_compat._memory import formulas
from gemma4_compat._memory.blueprint import Blueprint
from gemma4_compat._memory.formulas import Load


def storages(cache: Any) -> int:
    """Bytes of the distinct storages of a cache's keys and values."""
    found = {}
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is not None and tensor.numel():
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def cached(blueprint: Blueprint, load: Load, *, prefill: bool) -> int:
    """The planner's sum over the layers."""
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(formulas, "rounded", lambda nbytes: nbytes)  # storages are not rounded on the CPU
        return sum(formulas.kv_cache(block, load, blueprint.item, prefill=prefill) for block in blueprint.layers)


@contextlib.contextmanager
def watched() -> Iterator[dict[str, int]]:
    """``peak``: the most bytes that storages made inside were alive at once. Counts on meta as well."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = {"now": 0, "peak": 0}
    alive: set[int] = set()

    def gone(key: int, nbytes: int) -> None:
        alive.discard(key)
        counts["now"] -= nbytes

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = {
                item.untyped_storage()._cdata
                for item in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(item, torch.Tensor)
            }
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    key = storage._cdata
                    if key not in alive and key not in before:
                        alive.add(key)
                        counts["now"] += storage.nbytes()
                        weakref.finalize(storage, gone, key, storage.nbytes())
            counts["peak"] = max(counts["peak"], counts["now"])
            return out

    gc.collect()
    with Watch():
        yield counts
