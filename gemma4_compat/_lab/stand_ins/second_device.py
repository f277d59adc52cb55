"""A second device on any machine: the CPU under another name, whose tensors refuse to be mixed with others.

The mistake of a model on two GPUs, a tensor left on the other GPU, is an error here as it is there. Values come from
the CPU's kernels, so a model on both devices has the bits of one on the CPU, including gradients. It is a PyTorch
backend written in Python (``torch.utils.backend_registration``, experimental): each of its tensors holds a CPU tensor,
on which every operation runs. PyTorch supports one such device, so it is the second beside ``torch.device("cpu")``;
accelerate treats that as a device to compute on, while it offloads to ``"cpu"``.

The backend stays registered until the process ends, so use it in a separate process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

TYPE = "second"
#: Its name in a device map.
DEVICE = f"{TYPE}:0"

_ATEN = torch.ops.aten
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default)
#: Operations whose indices may be on the CPU.
_INDEXED = (_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)
_SET_DATA = torch.Tensor.data.__set__
#: Marks tensors made by ``torch.tensor(number)``, which would be on the host, not on the other GPU.
_NUMBER = "made_of_a_number"
_kernels: list[Any] = []  # registered once
#: Seconds in which the device's thread drops the tensors of the last backward pass. Where it does so while the
#: interpreter ends, Python ends the thread, and C++ the process ("terminate called without an active exception").
_REST = 0.2


def available() -> bool:
    """Whether this PyTorch accepts backends written in Python."""
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


class SecondTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor on the second device; ``on_cpu`` has its values in the same layout."""

    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, requires_grad: bool | None = None, **_: Any) -> Any:
        """With ``requires_grad`` a parameter on the device of ``data``; accelerate builds parameters of any class
        so.
        """
        if requires_grad is not None:
            return torch.nn.Parameter(data, requires_grad=requires_grad)
        how: dict[str, Any] = {"layout": data.layout}
        if data.layout is torch.strided:
            how = {"strides": data.stride(), "storage_offset": data.storage_offset()}
        device = torch.device(DEVICE)
        made = torch.Tensor._make_wrapper_subclass(cls, data.size(), dtype=data.dtype, device=device, **how)
        made.on_cpu = data.detach()
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SecondTensor({self.on_cpu!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            made = SecondTensor(self.on_cpu.clone())
            memo[id(self)] = (
                torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made
            )
        return memo[id(self)]

    def untyped_storage(self) -> Any:
        return self.on_cpu.untyped_storage()

    def data_ptr(self) -> int:
        return int(self.on_cpu.data_ptr())

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, SecondTensor):
            raise RuntimeError(f"incompatible tensor type: .data of a tensor on {DEVICE} set to one on {value.device}")
        torch.Tensor.data.__set__(self, value)  # size and dtype
        self.on_cpu = value.on_cpu

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` with the CPU's kernels; results are on the device where real kernels would leave them.

    Raises:
        RuntimeError: the arguments are on several devices.
    """
    with torch._C.DisableTorchFunction():  # modes would hear of every attribute that is read here
        tensors: list[torch.Tensor] = []
        plain_args, plain_kwargs = _plain(args, tensors), {name: _plain(kwargs[name], tensors) for name in kwargs}
        ours = sum(isinstance(tensor, SecondTensor) for tensor in tensors)
        here = ours > 0
        if 0 < ours < len(tensors) and func not in _COPIES:
            _refuse_mixed(func, args, tensors)
        asked = kwargs.get("device")
        if asked is not None:
            here = torch.device(asked).type == TYPE
            if here:
                plain_kwargs["device"] = torch.device("cpu")
        if here and func is _ATEN.histc.default:  # which accepts integers everywhere except on a CPU
            output = func(plain_args[0].float(), *plain_args[1:], **plain_kwargs).to(plain_args[0].dtype)
        else:
            output = func(*plain_args, **plain_kwargs)
        if not here:
            return output
        output = _on_second(output)
        return return_and_correct_aliasing(func, args, kwargs, output) if _gives_alias(func) else output


def _plain(value: Any, found: list[torch.Tensor]) -> Any:
    """An argument of an operation with the CPU's tensors; those it has are added to ``found``.

    ``torch.utils._pytree`` could do this, but with tens of thousands of operations it takes longer than they do.
    """
    if isinstance(value, torch.Tensor):
        found.append(value)
        return value.on_cpu if isinstance(value, SecondTensor) else value
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([_plain(item, found) for item in value])
    return value


def _on_second(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return SecondTensor(output)
    if isinstance(output, (list, tuple)):
        return type(output)([_on_second(item) for item in output])
    return output


@functools.cache
def _gives_alias(func: Any) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _refuse_mixed(func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse CPU tensors (the CPU stands for another GPU), except indices and numbers made on the host."""
    if func in _INDEXED:
        tensors = [tensor for tensor in (args[0], *args[2:3]) if isinstance(tensor, torch.Tensor)]
    devices = {str(tensor.device) for tensor in tensors if not hasattr(tensor, _NUMBER)}
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(devices))}! ({func})"
        )


class _Factories(TorchDispatchMode):  # type: ignore[misc]
    """Handles creation on the second device, where no argument is one of its tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and to tell the compiler so at each operation takes longer than most."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _SameKernels(TorchFunctionMode):  # type: ignore[misc]
    """Uses the CPU's attention: on unknown devices PyTorch composes it from other operations, which differ bitwise.

    Also lets ``.data =`` move a parameter between devices, as between a CPU and a GPU, and marks numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and "device" not in kwargs:
            made = func(*args, **kwargs)
            if made.dim() == 0:
                setattr(made, _NUMBER, True)
            return made
        if func == _SET_DATA and isinstance(args[0], torch.nn.Parameter) and isinstance(args[1], SecondTensor):
            moved = torch.nn.Parameter(args[1], requires_grad=args[0].requires_grad)
            return torch.utils.swap_tensors(args[0], moved)
        if func is torch.nn.functional.scaled_dot_product_attention:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(isinstance(tensor, SecondTensor) for tensor in tensors):
                _refuse_mixed(func, args, tensors)
                leaves, structure = tree_flatten((args, kwargs))
                return _Attention.apply(func, structure, *leaves)
        return func(*args, **kwargs)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Attention by the CPU's kernel that autograd sees as one operation on the second device.

    With ``.cpu()`` its backward pass would run in the CPU's thread, concurrently with the device's thread, so
    gradients would be added up in a different order in each run.
    """

    @staticmethod
    def forward(ctx: Any, func: Any, structure: Any, *leaves: Any) -> Any:
        plain = [
            leaf.on_cpu.detach().requires_grad_(needed) if isinstance(leaf, SecondTensor) else leaf
            for leaf, needed in zip(leaves, ctx.needs_input_grad[2:])
        ]
        args, kwargs = tree_unflatten(plain, structure)
        with torch.enable_grad():
            ctx.plain, ctx.output = plain, func(*args, **kwargs)
        return SecondTensor(ctx.output)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        found = torch.autograd.grad(ctx.output, [ctx.plain[index] for index in wanted], gradient.on_cpu)
        gradients = dict(zip(wanted, map(SecondTensor, found)))
        return None, None, *(gradients.get(index) for index in range(len(ctx.plain)))


class _Backend:
    """The functions that PyTorch expects in the module of a device."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Does nothing: the device draws no random numbers itself."""

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def _register() -> None:
    """Register the device with PyTorch, and the operations that ``torch.tensor`` calls below every mode."""
    if _kernels:
        return
    backend_registration._setup_privateuseone_for_python_backend(TYPE, backend_module=_Backend())
    atexit.register(time.sleep, _REST)
    library = torch.library.Library("aten", "IMPL")
    _kernels.append(library)

    def empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
        return SecondTensor(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
        return SecondTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
        return _computed(_ATEN.copy_.default, (target, source), {})

    for name, kernel in (("empty.memory_format", empty), ("empty_strided", empty_strided), ("_copy_from", copy_from)):
        library.impl(name, kernel, "PrivateUse1")


@contextlib.contextmanager
def second_device() -> Iterator[None]:
    """Inside, ``torch.device(DEVICE)`` computes, in this thread and in the backward passes it starts."""
    _register()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter cannot change its class
    try:
        with _Factories(), _SameKernels():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
