"""Has somebody written to this tensor? Three answers: free, nearly free, and certain.

* :func:`stamp`: where it is, and how often operations have written to it. ``tensor._version`` misses fused optimizers,
  those of bitsandbytes, ``.data``, views of numpy and kernels of others.
* :func:`sample`: a number for 256 places of a tensor on the host.
* :func:`digest`: a number for every byte, read once for each ``generate``; a decoded token reads them as well.

A piece of memory is a table of 64-bit numbers. Sums of its rows and of its columns tell where a value is, which one
sum would not. They wrap, so an even number of changes to the highest bit cancels out: both sizes of the table are odd,
and no pattern in weights has them. The sums are then mixed with their positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

_COLUMNS = 1021
#: Few enough that the second sum reads a piece from the cache of the processor.
_ROWS = {"cpu": 511}
_ROWS_ON_A_DEVICE = 4099
#: Bytes: smaller tensors are put together first.
_SMALL = 1 << 16
#: Places of a tensor that are compared where all of them would take too long.
SAMPLES = 256
#: Odd numbers without a pattern, as int64.
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def stamp(tensor: Any) -> tuple[Any, ...]:
    """Where a tensor is, and how often operations have written to it, which an inference tensor does not count."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def tensors_in(value: Any) -> Iterator[Any]:
    """The tensors in tuples, lists and the values of dictionaries, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def named_tensors(state: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of a ``QuantState`` of bitsandbytes by its name; those of its nested state follow ``state2.``."""
    import torch

    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif name == "state2" and value is not None:
            yield from ((f"{name}.{inner}", tensor) for inner, tensor in named_tensors(value))


def digest(tensors: Iterable[Any]) -> tuple[int, ...]:
    """A number for the values on each device but meta. Waits for the devices. The order of the tensors counts."""
    return tuple([int(number(found)) for _, found in sorted(by_device(tensors).items())])


def by_device(tensors: Iterable[Any]) -> dict[str, list[Any]]:
    """The memory of tensors by the name of their device, uint8 [bytes] each; of those with gaps, a copy."""
    import torch

    found: dict[str, list[Any]] = {}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # bitsandbytes' parameters take a detour
        for tensor in tensors:
            for part in _plain(tensor.detach()):
                if part.numel() and part.untyped_storage().nbytes() and not part.is_meta:
                    found.setdefault(str(part.device), []).append(_bytes(part))
    return found


def number(found: list[Any]) -> Any:
    """One number for all bytes of one device, int64 []."""
    import torch

    with torch.no_grad():
        return _mixed(torch.cat(list(_sums(found))))


def sample(tensor: Any) -> tuple[int, ...]:
    """The same, of up to :data:`SAMPLES` places of one tensor on the host, from its beginning to its end."""
    import torch

    if tensor.layout is not torch.strided or not tensor.numel():
        return ()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        found = _bytes(tensor.detach(), copy=False)
        if found is None:
            return ()
        step = max(len(found) // SAMPLES, 8) // 8 * 8 + 1  # not always the same byte of a number
        return digest([found[::step].clone(), found[-8:].clone()])


def sampled(tensor: Any) -> tuple[Any, ...]:
    """:func:`stamp` and :func:`sample` of a tensor on the host."""
    return stamp(tensor), sample(tensor)


def _plain(tensor: Any) -> Iterator[Any]:
    """The tensors that hold the values of one: itself, unless it is made of others."""
    import torch

    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain(getattr(tensor, name).detach())
    elif tensor.layout is torch.strided:
        yield tensor


def _bytes(tensor: Any, *, copy: bool = True) -> Any:
    """Its memory, uint8 [bytes]; of a tensor with gaps, a copy, or None without ``copy``."""
    import torch

    if not tensor.is_contiguous():
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)  # a transposed one has no gaps
        if not tensor.is_contiguous():
            if not copy:
                return None
            tensor = tensor.contiguous()
    return tensor.reshape(-1).view(torch.uint8)


def _sums(found: list[Any]) -> Iterator[Any]:
    """Sums over these bytes, int64."""
    import torch

    small = [memory for memory in found if len(memory) < _SMALL]
    if small:
        joined = torch.cat(small)
        found = [joined, *(memory for memory in found if len(memory) >= _SMALL)]
    for memory in found:
        if memory.storage_offset() % 8:
            memory = memory.clone()
        whole = len(memory) // 8 * 8
        if whole < len(memory):
            yield memory[whole:].long()
        at_once = _ROWS.get(memory.device.type, _ROWS_ON_A_DEVICE) * _COLUMNS
        for piece in memory[:whole].view(torch.int64).split(at_once):
            rows = len(piece) // _COLUMNS
            if rows * _COLUMNS < len(piece):
                yield piece[rows * _COLUMNS :]
            if rows:
                table = piece[: rows * _COLUMNS].view(rows, _COLUMNS)
                yield table.sum(0)
                yield table.sum(1)


def _mixed(numbers: Any) -> Any:
    """One number for many, each at its position: int64 [] for int64 [n]."""
    import torch

    first, second, third = _FACTORS
    numbers = numbers + first * torch.arange(1, len(numbers) + 1, device=numbers.device)
    numbers = (numbers ^ (numbers >> 31)) * second
    numbers = (numbers ^ (numbers >> 29)) * third
    return (numbers ^ (numbers >> 32)).sum()
