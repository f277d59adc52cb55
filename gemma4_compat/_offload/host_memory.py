"""Host memory that an accelerator reads: where an offloaded weight is stored, pinned in place, viewed from the device.

Nothing is copied here. ``cudaHostRegister`` pins existing memory (``Tensor.pin_memory`` would copy it and round its
size up to a power of two). Pinned memory has the same address on the device (unified virtual addressing, CUDA C++
Programming Guide, "Mapped memory"), so a kernel can read single rows of a weight on the host.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._gemma4.accelerate import module_hooks


@dataclass(eq=False)
class Stored:
    """An offloaded weight in its storage, not copied.

    The meta parameter may have yet another dtype, for example after ``model.float()``: accelerate converts a weight
    for every forward.

    Attributes:
        raw: as it is stored; memory-mapped from its file if ``on_disk``.
        casts: the dtypes a read passes through: the model's, if a checkpoint with another dtype stays on disk, then
            those of :class:`CastWeights`.
        on_disk: whether reading it reads a file.
        holder: the dict that holds it under ``key``, if it is in host memory; else None.
        key: its name there, or in ``index``.
        index: the dict that says, under ``key``, which file it is in; None in host memory.
        folder: where accelerate offloads to; None if everything is read from the checkpoint.
    """

    raw: Any
    _: KW_ONLY
    on_disk: bool
    casts: tuple[Any, ...] = ()
    holder: dict[str, Any] | None = None
    key: str = ""
    index: dict[str, Any] | None = None
    folder: Any = None
    _cast_by: list[tuple[CastWeights, str]] = field(default_factory=list)

    @property
    def dtype(self) -> Any:
        """The dtype of the weight when it is read."""
        return self.casts[-1] if self.casts else self.raw.dtype

    @property
    def tensor(self) -> Any:
        """The whole weight as it is read: a copy in memory if it is stored in another dtype."""
        return cast(self.raw, self.casts)

    def cast_by(self, weights: CastWeights, name: str) -> Stored:
        """The same, read through ``weights``."""
        self.casts += weights.casts.get(name, ())
        self._cast_by.append((weights, name))
        return self

    def replace(self, tensor: Any) -> None:
        """From now on host memory keeps ``tensor``, the weight as it was read."""
        if self.holder is not None:
            self.holder[self.key] = tensor
            self.forget_casts()
        self.raw, self.casts = tensor, ()

    @property
    def is_recast(self) -> bool:
        """Whether :class:`CastWeights` casts it."""
        return any(weights.casts.get(name) for weights, name in self._cast_by)

    def forget_casts(self) -> None:
        """Drop the casts: a new value is stored, in the dtype in which it is to be read."""
        for weights, name in self._cast_by:
            weights.casts.pop(name, None)


class CastWeights(Mapping[str, Any]):
    """What an accelerate hook onloads, with casts that lost bits repeated on some weights.

    ``model.half()`` changes the dtype of a meta parameter but not the stored value. On one device it loses bits, and
    no later ``float()`` brings them back. So every read of such a weight repeats the cast.

    Args:
        dataset: the hook's previous ``weights_map``.
        casts: by name, the dtypes that a weight was cast to since.
    """

    prefix = ""  # like accelerate's PrefixedDataset, for code that looks through one

    def __init__(self, dataset: Any, casts: dict[str, tuple[Any, ...]]) -> None:
        self.dataset, self.casts = dataset, casts

    def __getitem__(self, name: str) -> Any:
        return cast(self.dataset[name], self.casts.get(name, ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self.dataset)

    def __len__(self) -> int:
        return len(self.dataset)


def cast(tensor: Any, dtypes: tuple[Any, ...]) -> Any:
    """The tensor, cast to one dtype after another."""
    for dtype in dtypes:
        tensor = tensor.to(dtype)
    return tensor


def note_casts(module: Any) -> None:
    """Repeat the casts that lost bits of the module's offloaded tensors whenever these are read."""
    hook = module_hooks.offload_hook(module)
    if hook is None or hook.weights_map is None:
        return
    noted: dict[str, tuple[Any, ...]] = {}
    options = {"recurse": hook.place_submodules, "remove_duplicate": False}
    for name, tensor in (*module.named_parameters(**options), *module.named_buffers(**options)):
        # The dtype of a subclass, a quantized weight, says nothing about its values. A plain weight need not be on
        # meta: accelerate ties an offloaded head to an embedding on the device until the head's first forward.
        if tensor.dtype.is_floating_point and is_plain(tensor):
            with contextlib.suppress(KeyError):
                if not _holds(tensor.dtype, stored(hook.weights_map, name).dtype):
                    noted[name] = (tensor.dtype,)
    if noted:
        before = hook.weights_map
        if isinstance(before, CastWeights):
            noted = {**before.casts, **{name: before.casts.get(name, ()) + casts for name, casts in noted.items()}}
            before = before.dataset
        hook.weights_map = CastWeights(before, noted)  # a new object: anything derived from the old one is stale


def is_plain(tensor: Any) -> bool:
    """Whether the tensor's dtype is that of its values; a quantized weight's is not."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _holds(dtype: Any, other: Any) -> bool:
    """Whether a floating-point dtype can hold all values of ``other``."""
    import torch

    if not other.is_floating_point:
        return True
    wide, narrow = torch.finfo(dtype), torch.finfo(other)
    return bool(
        wide.eps <= narrow.eps
        and wide.max >= narrow.max
        and wide.smallest_normal * wide.eps <= narrow.smallest_normal * narrow.eps
    )


def stored(weights_map: Any, name: str) -> Stored:
    """Look up ``name`` in the ``weights_map`` of an accelerate hook without loading a file or using a device.

    Raises:
        KeyError: it is not there.
    """
    import torch

    if isinstance(weights_map, collections.ChainMap):
        for part in weights_map.maps:
            # ``in`` would load it: accelerate's mappings do not implement ``__contains__``.
            with contextlib.suppress(KeyError):
                return stored(part, name)
        raise KeyError(name)
    if isinstance(weights_map, CastWeights):
        return stored(weights_map.dataset, name).cast_by(weights_map, name)
    prefix = getattr(weights_map, "prefix", None)
    if prefix is not None and hasattr(weights_map, "dataset"):
        return stored(weights_map.dataset, f"{prefix}{name}")
    held = getattr(weights_map, "state_dict", weights_map if isinstance(weights_map, dict) else {})
    if name in held:
        return Stored(held[name], on_disk=False, holder=held, key=name)
    index = getattr(weights_map, "index", {})
    if name in index:
        entry = index[name]
        dtype = getattr(torch, entry["dtype"]) if "dtype" in entry else None
        folder = weights_map.save_folder
        raw = _mapped(entry, name, folder)
        casts = () if dtype in (None, raw.dtype) else (dtype,)
        return Stored(raw, on_disk=True, casts=casts, key=name, index=index, folder=folder)
    return Stored(weights_map[name], on_disk=False)  # another library's mapping: as it returns it


def _mapped(entry: dict[str, Any], name: str, folder: Any) -> Any:
    """A tensor over a file: an entry of accelerate's index of offloaded weights, or of a safetensors file."""
    import torch

    if entry.get("safetensors_file") is not None:
        from safetensors import safe_open

        with safe_open(entry["safetensors_file"], framework="pt", device="cpu") as file:
            return file.get_tensor(entry.get("weight_name", name))
    shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
    path = Path(folder, f"{name}.dat")
    return torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=dtype).view(shape)


class Pinned:
    """Host memory of a contiguous CPU tensor, pinned in place as long as this object, or a view of it, lives.

    Args:
        tensor: on the CPU.
        pinned_by: the object that pinned the same memory earlier, kept alive.

    Attributes:
        readers: the devices that it was pinned for.
    """

    def __init__(self, tensor: Any, pinned_by: Pinned | None = None) -> None:
        self.tensor, self.pinned_by = tensor, pinned_by
        self.readers: dict[Any, None] = {} if pinned_by is None else pinned_by.readers

    def view_on(self, device: Any) -> Any:
        """The same memory as a tensor on ``device``; None if its address there differs."""
        import torch

        flat = self.tensor.view(-1).view(torch.uint8)
        interface = _ArrayInterface(self, flat.data_ptr(), flat.numel())
        with torch.cuda.device(device):
            view = torch.as_tensor(interface, device=device)
        if view.data_ptr() != flat.data_ptr():  # it was copied
            return None
        return view.view(self.tensor.dtype).view(self.tensor.shape)


class _ArrayInterface:
    """``torch.as_tensor`` makes a tensor from it without a copy; the tensor keeps it, and so the memory, alive."""

    def __init__(self, memory: Pinned, address: int, size: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def pin(tensor: Any, device: Any) -> Pinned | None:
    """Pin the memory of a contiguous CPU tensor for ``device``; None, with one warning, if that fails.

    Takes about 0.04 s per GiB and no memory. None without a warning if the device is not a CUDA (or ROCm) device.
    """
    import torch

    device = torch.device(device)
    if device.type != "cuda" or not tensor.numel() or not tensor.is_contiguous():
        return None
    _unpin_deferred()
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    before = _registered.get((address, size))
    if before is not None:  # a tied weight, or a model that is dispatched again: memory is pinned once
        before.readers[device] = None
        return Pinned(tensor, before)
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        error = int(runtime.cudaHostRegister(address, size, _PORTABLE))
        if error:
            _forget_error()
    if error:
        _warn_once(f"cudaHostRegister: error {error}")
        return None
    memory = _registered[address, size] = Pinned(tensor)
    memory.readers[device] = None
    # The finalizer's own reference keeps the tensor until it has run: the memory is unpinned before it is freed.
    weakref.finalize(memory, _unpin, tensor, memory.readers, os.getpid()).atexit = False
    return memory


def staging(shape: tuple[int, ...], dtype: Any) -> Any:
    """An empty CPU tensor for copies to a device: pinned, or pageable with one warning if pinning fails.

    torch does not reuse its pinned memory before the copies from it have finished.
    """
    import torch

    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        _warn_once(" ".join(str(error).split())[:120])
        return torch.empty(shape, dtype=dtype)


_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
#: What is pinned now, by address and size in bytes.
_registered: weakref.WeakValueDictionary[tuple[int, int], Pinned] = weakref.WeakValueDictionary()


def _forget_error() -> None:
    """Launch a kernel that consumes the error: CUDA keeps it, and torch would blame the next kernel."""
    import torch

    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as late:
        if "CUDA error" not in str(late):
            raise


#: What could not be unpinned yet: a tensor, and the devices that its memory was pinned for.
_deferred: collections.deque[tuple[Any, Mapping[Any, None]]] = collections.deque()


def _unpin(tensor: Any, readers: Mapping[Any, None], process: int) -> None:
    if process == os.getpid():  # a forked child has pinned nothing, and cannot call CUDA
        _deferred.append((tensor, readers))
        _unpin_deferred()


def _unpin_deferred() -> None:
    """Unpin what nothing uses any more. Waits while a CUDA graph is captured: synchronizing would end the capture."""
    import torch

    while _deferred and not torch.cuda.is_current_stream_capturing():
        tensor, readers = _deferred.popleft()
        for device in readers:
            torch.cuda.synchronize(device)  # a kernel may still be reading it
        with torch.cuda.device(next(iter(readers))):
            if int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())):
                _forget_error()


@functools.cache  # one warning per reason
def _warn_once(error: str) -> None:
    notice.warn_user(
        f"host memory cannot be pinned here ({error}): offloaded weights travel through "
        "pageable memory, slower and not beside the computation. Free host memory, or raise the limit on locked "
        "memory (ulimit -l)."
    )
