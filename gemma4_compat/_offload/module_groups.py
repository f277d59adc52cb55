"""Module groups: the offloaded tensors of one layer, packed in one host buffer and in one buffer on the device.

accelerate keeps a host tensor per weight. A group packs those of a layer into one pinned buffer, which travels as one
copy; the tensors on the device are views of one buffer there.

Autograd keeps tensors of a forward for the backward pass, and bitsandbytes keeps a 4-bit weight where no hook for
saved tensors sees it. So a group's tensors on the device are always the same objects. Only the memory below them comes
and goes (``UntypedStorage.resize_``, as in PyTorch's FSDP).

:mod:`gemma4_compat._offload.streaming` decides when a group is copied, onloaded and offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._models import placement
from gemma4_compat._offload import host_memory, int8_state, torch_internals
from gemma4_compat._offload.idle_hooks import HookedForward, is_accelerates_forward
from gemma4_compat._quantization import quant_states

ALIGNMENT = 512  # bytes; what the caching allocator gives, and more than any kernel asks for


class ModuleGroup:
    """The offloaded tensors of one layer, on the host and, for a time, on the device.

    Attributes:
        device: where the layer computes.
        size: bytes.
        on_disk: a copy reads files.
        on_device: the group has its memory on the device. The copy into it was issued, and may still run.
        copied: the event after that copy; None on a device without streams.
        onloaded: the layer's modules have their weights, and no hooks.
        on_output: called with an output of the layer; prepares for the gradient of that output.
    """

    on_output: Callable[[Any], None]

    def __init__(self, device: Any, weights: list[OffloadedWeight], forwards: list[HookedForward]) -> None:
        self.device = device
        self.on_device = self.onloaded = False
        self.copied: Any = None
        self._weights, self._forwards = weights, forwards
        self._sources: list[HostTensor] = []
        self._offsets: list[int] = []  # of each in the buffers
        offset = 0
        for weight in weights:
            for source in weight.sources():
                self._sources.append(source)
                self._offsets.append(offset)
                offset += -(-source.size // ALIGNMENT) * ALIGNMENT
        self.size = offset
        self.on_disk = any(weight.stored.on_disk for weight in weights)
        self._host_buffer: Any = None
        self._pinned: Any = None  # keeps the host buffer pinned
        self._buffer: Any = None  # on the device
        self._filled: Any = None  # the part of it that a copy writes
        self._views: list[Any] = []  # the tensors in it
        # is_stale and onload_ run for every token, so these are plain tuples.
        self._snapshot = [weight.snapshot() for weight in weights]
        self._swaps: list[tuple[dict[str, Any], str, Any]] = []

    def modules(self) -> list[Any]:
        """Those whose weights are in the group."""
        return [weight.module for weight in self._weights]

    @classmethod
    def from_layer(cls, layer: Any) -> ModuleGroup | None:
        """The group of a layer as it is now; None for a layer without weights to stream, or left to accelerate."""
        device = placement.hook_device(layer)
        weights: list[OffloadedWeight] = []
        forwards: list[HookedForward] = []
        for part in layer.modules():
            if part is layer or "_hf_hook" not in vars(part):
                continue
            if device is None or placement.hook_device(part) != device:
                return None
            if not _only_places(vars(part)["_hf_hook"]):  # somebody else's hook has to run
                return None
            hook = placement.offload_hook(part)
            if hook is not None:
                if hook.offload_buffers or hook.place_submodules or hook.tied_params_names:
                    return None
                if not is_accelerates_forward(part):  # somebody's own forward is around the hook's, and has to run
                    return None
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        weight = OffloadedWeight.of(part, name, parameter, hook)
                        if weight is None:
                            return None
                        weights.append(weight)
            if "_old_forward" in vars(part):
                forwards.append(HookedForward(part))
        return cls(device, weights, forwards) if weights else None

    def is_stale(self) -> bool:
        """Whether a weight, a hook or the place of a weight on the host has changed since this group was created."""
        for (
            parameters,
            name,
            meta,
            dtype,
            state,
            attributes,
            forward,
            hooks,
            hook,
            place,
            held,
            key,
            value,
        ) in self._snapshot:
            if (
                parameters.get(name) is not meta
                or meta.dtype is not dtype
                or attributes.get("_hf_hook") is not hooks
                or attributes.get("forward") is not forward
                or hook.weights_map is not place
                or not hook.offload
                or (held is not None and held.get(key) is not value)
                or (state is not None and meta.quant_state is not state)
            ):
                return True
        return False

    def host_entries(self) -> list[tuple[dict[Any, Any], Any]]:
        """Dictionaries and keys under which the host keeps the weights."""
        stored = (weight.stored for weight in self._weights)
        return [(one.holder, one.key) for one in stored if one.holder is not None]

    def hook_entries(self) -> list[tuple[dict[Any, Any], Any]]:
        """Dictionaries and keys of the hooks that say where the host keeps the weights."""
        hooks = [vars(weight.hook) for weight in self._weights]
        return [(hook, key) for hook in hooks for key in ("weights_map", "offload")]

    def watch_outputs(self, on_output: Callable[[Any], None]) -> None:
        """Have ``on_output`` called with the outputs of modules with weights, in forwards that are ``watched``."""
        self.on_output = on_output
        modules = {weight.module for weight in self._weights}
        for forward in self._forwards:
            if forward.module in modules:
                forward.watch(on_output)

    def onload_(self, *, watched: bool = False) -> None:
        """Give the modules their weights on the device, and bypass the hooks inside the layer. Copies nothing."""
        for forward in self._forwards:
            forward.unwrap(watched=watched)
        if not self._swaps:
            for weight in self._weights:
                weight.onload_(self._views)
            if all(weight.is_reusable for weight in self._weights):
                self._swaps = [weight.swap() for weight in self._weights]
        for parameters, name, parameter in self._swaps:
            parameters[name] = parameter
        self.onloaded = True

    def offload_(self) -> None:
        """Put the modules back as accelerate left them. The memory on the device stays."""
        for weight in self._weights:
            weight.offload_()
        for forward in self._forwards:
            forward.wrap()
        self.onloaded = False

    def allocate(self, size: int) -> None:
        """Take ``size`` bytes on the device, in the current stream's pool."""
        import torch

        if self._buffer is not None:
            torch_internals.resize(self._buffer, size)
            return
        with torch.inference_mode(False):
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._filled = self._buffer.data[: self.size]
            self._views = [
                _view(self._buffer, offset, source)
                for offset, source in zip(self._offsets, self._sources, strict=True)
            ]
            first = 0
            for weight in self._weights:
                first = weight.assign(first)

    def free(self) -> None:
        """Give the memory on the device back; the tensors in it stay, empty."""
        torch_internals.resize(self._buffer, 0)

    def copy_from_host(self) -> None:
        """Copy the group from the host, without waiting where its buffer there is pinned."""
        import torch

        # `_filled` counts its own versions: a second copy brings the same values, and autograd must not take the
        # tensors it kept for changed.
        with torch.no_grad():
            if self.on_disk:
                self._copy_from_disk(self._filled)
            else:
                if self._host_buffer is None:
                    self._pack()
                self._filled.copy_(self._host_buffer, non_blocking=True)

    def _pack(self) -> None:
        """Move the layer's host tensors into one buffer, pinned where possible."""
        import torch

        with torch.inference_mode(False):
            host = torch.empty(self.size, dtype=torch.uint8)
            views = [_part(host, offset, source) for offset, source in zip(self._offsets, self._sources, strict=True)]
        for view, source in zip(views, self._sources, strict=True):
            source.copy_to(view)
        self._pinned = host_memory.pin(host, self.device)
        for weight in self._weights:
            weight.move_host_copy(views)  # which frees the memory it had
        self._sources, self._host_buffer = [HostTensor(view) for view in views], host
        self._snapshot = [weight.snapshot() for weight in self._weights]

    def _copy_from_disk(self, buffer: Any) -> None:
        """Copy out of memory-mapped files, through pinned memory on the way to a GPU."""
        import torch

        target = buffer
        if self.device.type == "cuda":
            target = host_memory.staging((self.size,), torch.uint8)
        for offset, source in zip(self._offsets, self._sources, strict=True):
            source.copy_to(_view(target, offset, source))
        if target is not buffer:
            buffer.copy_(target, non_blocking=True)


class HostTensor:
    """A tensor on the host, and the dtype that it has on the device.

    Args:
        tensor: as it is stored.
        casts: the dtypes through which it goes to the device.
    """

    def __init__(self, tensor: Any, casts: tuple[Any, ...] = ()) -> None:
        self.shape, self.dtype = tensor.shape, casts[-1] if casts else tensor.dtype
        self.size: int = tensor.numel() * self.dtype.itemsize  # bytes, on the device
        self._tensor, self._casts = tensor, casts

    def copy_to(self, view: Any) -> None:
        """Copy it to a tensor of its dtype on the device."""
        view.copy_(host_memory.cast(self._tensor, self._casts[:-1]))


class OffloadedWeight:
    """One offloaded parameter of a module in a group, with its quantization tensors.

    Attributes:
        module: the module that has the parameter.
        hook: accelerate's, which offloads it.
        stored: where the host keeps its data.
    """

    def __init__(self, module: Any, name: str, meta: Any, hook: Any, stored: Any, quantization: list[Any]) -> None:
        self.module, self.stored = module, stored
        self._name, self._meta, self.hook = name, meta, hook
        self._hooks, self._map = vars(module)["_hf_hook"], hook.weights_map
        self._forward = vars(module)["forward"]
        self._value, self._state = stored.raw, vars(meta).get("quant_state")
        self._dtype = meta.dtype
        self._quantization = quantization  # scales and code books
        self._first = 0  # position of its tensors in the group
        self._parameter: Any = None  # on the device

    @classmethod
    def of(cls, module: Any, name: str, parameter: Any, hook: Any) -> OffloadedWeight | None:
        """None for a parameter that cannot be part of a group: not on meta, scales lost, of an unknown class."""
        import torch

        if parameter.device.type != "meta":
            return None
        stored = host_memory.stored(hook.weights_map, name)
        kind = type(parameter).__name__
        quantization: list[Any] = []
        if kind == "Params4bit":
            state = parameter.quant_state
            if not parameter.bnb_quantized or state is None or quant_states.is_packed(state):
                return None
            if not quant_states.is_pristine(state):
                return None
            quantization = list(quant_states.tensors(state))
        elif kind == "Int8Params":
            scales = vars(parameter).get("SCB")
            if scales is None or scales.device.type == "meta":
                try:
                    scales = host_memory.stored(hook.weights_map, "SCB").tensor
                except KeyError:
                    return None
                vars(scales)[quant_states.PRISTINE] = True
                parameter.SCB = scales  # where bitsandbytes-int8-meta-scales keeps them
            quantization = [scales]
        elif type(parameter) is not torch.nn.Parameter:
            return None
        if quantization and stored.dtype != parameter.dtype:
            return None
        return cls(module, name, parameter, hook, stored, quantization)

    def sources(self) -> Iterator[HostTensor]:
        """Its host tensors, the data first."""
        # The parameter's dtype is not the stored one where the model was cast since (model.float()).
        same = self._value.dtype == self._dtype and not self.stored.casts
        yield HostTensor(self._value, () if same else (*self.stored.casts, self._dtype))
        for tensor in self._quantization:
            yield HostTensor(tensor)

    def assign(self, first: int) -> int:
        """Its tensors are those of the group from position ``first`` on; returns the position after them."""
        self._first = first
        return first + 1 + len(self._quantization)

    def move_host_copy(self, views: list[Any]) -> None:
        """From now on the host keeps its tensors in the group's buffer."""
        data, *quantization = self._own(views)
        self.stored.replace(data)
        self._value = data
        if type(self._meta).__name__ == "Params4bit":
            known = {id(old): new for old, new in zip(self._quantization, quantization, strict=True)}
            quant_states.replace_tensors(self._meta.quant_state, known)
            self._quantization = quantization

    def snapshot(self) -> tuple[Any, ...]:
        """What :meth:`ModuleGroup.is_stale` compares."""
        attributes, stored = vars(self.module), self.stored
        return (
            *(attributes["_parameters"], self._name, self._meta, self._dtype, self._state),
            *(attributes, self._forward, self._hooks, self.hook, self._map),
            *(stored.holder, stored.key, self._value),
        )

    @property
    def is_reusable(self) -> bool:
        """Whether the parameter on the device serves for more than one forward."""
        # On a CPU bitsandbytes may repack a 4-bit weight in its forward; an 8-bit one it always takes apart.
        return self._parameter is not None and self._parameter.device.type != "cpu" and not self._is_int8

    @property
    def _is_int8(self) -> bool:
        return type(self._meta).__name__ == "Int8Params"

    def swap(self) -> tuple[dict[str, Any], str, Any]:
        """Where the parameter on the device goes, and that parameter."""
        return self.module._parameters, self._name, self._parameter

    def onload_(self, views: list[Any]) -> None:
        """Give the module its parameter on the device."""
        if self._parameter is None:
            self._parameter = self._device_parameter(views)
        self.module._parameters[self._name] = self._parameter

    def offload_(self) -> None:
        """Give the module its parameter on meta."""
        self.module._parameters[self._name] = self._meta
        if not self.is_reusable:
            if self._state is not None and self._parameter is not None:
                quant_states.note_dtype(self._parameter.quant_state)
            self._parameter = None
        if self._is_int8 and vars(self.module).get("state") is not None:
            int8_state.reset(self.module)

    def _own(self, tensors: list[Any]) -> list[Any]:
        return tensors[self._first : self._first + 1 + len(self._quantization)]

    def _device_parameter(self, views: list[Any]) -> Any:
        import torch

        data, *quantization = self._own(views)
        with torch.inference_mode(False):
            parameter = torch.Tensor._make_subclass(type(self._meta), data.data, False)
            vars(parameter).update(vars(self._meta))
            if type(self._meta).__name__ == "Params4bit":
                known = {id(old): new for old, new in zip(self._quantization, quantization, strict=True)}
                parameter.quant_state = quant_states.with_tensors(self._meta.quant_state, known)
            elif type(self._meta).__name__ == "Int8Params":
                parameter.CB, parameter.SCB = parameter.data, quantization[0]
        return parameter


def _view(buffer: Any, offset: int, source: HostTensor) -> Any:
    """The bytes of ``buffer`` from ``offset`` on, as a contiguous tensor of the dtype and shape of ``source``."""
    return buffer[offset : offset + source.size].view(source.dtype).view(source.shape)


def _part(host: Any, offset: int, source: HostTensor) -> Any:
    """:func:`_view` of a buffer on the host, with a storage of its own over the same memory, no larger than it is.

    Whoever saves a state dict, or copies a parameter, takes whole storages, and each as of one dtype.
    """
    import torch

    if not source.size:
        return torch.empty(source.shape, dtype=source.dtype)
    return torch.from_numpy(host[offset : offset + source.size].numpy()).view(source.dtype).view(source.shape)


def _only_places(hook: Any) -> bool:
    """Whether an accelerate hook does nothing but place the module's weights and inputs."""
    return all(type(one).__name__ == "AlignDevicesHook" for one in getattr(hook, "hooks", (hook,)))
