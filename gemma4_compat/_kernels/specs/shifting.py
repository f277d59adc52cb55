"""A full sliding cache drops its first row for each new one: one kernel moves the rows of a layer in place.

PyTorch copies keys and values twice, once aside and once back. ``cuda/shifting.cuh`` only moves words, so the bits are
those of the copies, which remain where the layout does not suit.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from gemma4_compat._kernels.programs import Kernel, instance

#: The name in an operation's signature.
OPERATION = "shift of a sliding cache"
_STRIP = 32  # bytes of a row that a block moves
_THREADS = 1024
_TIMES = 4  # words of a thread between two barriers, at most
_WORDS = {16: "Word16", 8: "uint2", 4: "unsigned int", 2: "u16"}  # by bytes
_log = logging.getLogger("gemma4_compat")


def kernel_of(keys: Any, values: Any, new_keys: Any, new_values: Any) -> tuple[Kernel, tuple[Any, ...]] | None:
    """The kernel that moves the rows of a layer, and its operation's signature; None if the layout does not suit.

    Args:
        keys: (batch, heads, rows, width), contiguous. The kernel writes it, and ``values`` likewise.
        values: as ``keys``.
        new_keys: (batch, heads, 1, width), the last row from now on.
        new_values: as ``new_keys``.
    """
    batch, heads, rows, width = keys.shape
    fresh, held = (new_keys, new_values), (keys, values)
    size = width * keys.itemsize
    word = next((one for one in _WORDS if _supports(one, size, fresh, held)), None)
    if (
        word is None
        or not keys.numel()
        or rows * size // word >= 1 << 32
        or batch * heads >= 1 << 16  # the grid's height
        or values.shape != keys.shape
        or any(tensor.shape != (batch, heads, 1, width) or tensor.stride(3) != 1 for tensor in fresh)
        or any((tensor.dtype, tensor.device) != (keys.dtype, keys.device) for tensor in (*fresh, values))
        or not all(tensor.is_contiguous() for tensor in held)
    ):
        _say(f"{keys.dtype}, {list(keys.shape)}, new rows of {list(new_keys.shape)} with strides {new_keys.stride()}")
        return None
    per = _STRIP // word
    threads = min(_THREADS, -(-rows * per // 32) * 32)
    times = min(_TIMES, -(-rows * per // threads))
    strides = [stride * keys.itemsize // word for tensor in fresh for stride in tensor.stride()[:2]]
    grid = (2 * -(-size // _STRIP), batch * heads)
    sizes = (rows, size // word, heads, *strides)
    kernel = Kernel(_text(word, times), (*fresh, *held), 2, sizes, threads, grid)
    return kernel, (OPERATION, (word, times), keys.dtype)


def _supports(word: int, size: int, fresh: tuple[Any, ...], held: tuple[Any, ...]) -> bool:
    """Whether rows of ``size`` bytes can be moved in words of so many."""
    addresses = [tensor.data_ptr() for tensor in (*fresh, *held)]
    steps = [stride * tensor.itemsize for tensor in fresh for stride in tensor.stride()[:2]]
    return not any(number % word for number in (size, *addresses, *steps))


@functools.cache
def _say(what: str) -> None:
    _log.info("gemma4_compat: PyTorch moves the rows of full sliding caches, since no kernel suits: %s", what)


def _text(word: int, times: int) -> str:
    return instance("shifting.cuh", "shift", _WORDS[word], _STRIP // word, times, _THREADS)


def trial(signature: tuple[Any, ...], device: Any) -> tuple[Kernel, Any, Any]:
    """A kernel of an operation for random bytes, what it writes, and what PyTorch's copies write."""
    import torch

    _, (word, times), dtype = signature
    step = _THREADS * word // _STRIP
    rows = step * times + (5 if times == _TIMES else -1)  # several rounds, if there can be
    shape = (2, 2, rows, 5 * word // dtype.itemsize)  # no whole strips
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Any:
        size = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8).view(dtype)

    found, fresh = drawn(2, *shape), drawn(2, *shape[:2], 1, shape[3])
    expected = found.clone()
    copied(*expected, *fresh)
    made = kernel_of(*found, *fresh)
    if made is None or made[1] != signature:
        raise ValueError(f"there is no kernel for {signature}")
    return made[0], found, expected


def copied(keys: Any, values: Any, new_keys: Any, new_values: Any) -> None:
    """The same by PyTorch's copies."""
    import torch

    for held, new in ((keys, new_keys), (values, new_values)):
        held.copy_(torch.cat((held[:, :, 1:], new), dim=-2))
