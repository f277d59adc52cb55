"""Module groups: the offloaded tensors of one layer, packed in one host buffer and one device buffer.

accelerate keeps one host tensor per weight. A group packs those of a layer into one pinned buffer, which is copied as
a whole; the tensors on the device are views of one buffer there.

Autograd keeps tensors of a forward for the backward pass, and bitsandbytes keeps a 4-bit weight where no hook for
saved tensors sees it. So a group's tensors on the device are always the same objects. Only the memory below them is
freed and allocated again (``UntypedStorage.resize_``, as in PyTorch's FSDP).

The experts of a layer come last in the buffers. A group may be on the device in part, without them: then the experts
module looks up the experts it needs in the host buffer (:mod:`gemma4_compat._offload.transfer.expert_lookup`).

That memory is elsewhere each time. CUDA graphs of training steps read one place, to which a group is copied before
each replay (:mod:`gemma4_compat._training.captured`).

:mod:`gemma4_compat._offload.transfer.streaming` decides when a group is copied, onloaded and offloaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.state.snapshots import Entries
from gemma4_compat._offload import host_memory, torch_internals
from gemma4_compat._offload.transfer import expert_lookup, parametrized
from gemma4_compat._offload.transfer.group_weights import HostTensor, OffloadedWeight
from gemma4_compat._offload.transfer.idle_hooks import HookedForward, is_accelerates_forward

ALIGNMENT = 512  # bytes; what the caching allocator gives, and more than any kernel asks for


class ModuleGroup:
    """The offloaded tensors of one layer, on the host and, temporarily, on the device.

    Attributes:
        device: where the layer computes.
        experts: the layer's experts module, if its forward can look experts up; or None.
        size: bytes.
        size_without_experts: bytes of the group in part.
        on_disk: whether a copy reads files.
        on_device: the group has its memory on the device. The copy into it was issued, and may still run.
        in_part: what is on the device, or was there last, is without the experts.
        copied: the event after that copy; None on a device without streams.
        onloaded: the layer's modules have their weights, and no hooks.
        on_output: called with an output of the layer; prepares for the gradient of that output.
        require_in_backward: has the group onloaded for the backward pass of the layer, which runs.
    """

    on_output: Callable[[Any], None]
    require_in_backward: Callable[[], None]

    def __init__(
        self, device: Any, weights: list[OffloadedWeight], forwards: list[HookedForward], experts: Any = None
    ) -> None:
        self.device, self.experts = device, experts
        self.on_device = self.onloaded = self.in_part = False
        self.copied: Any = None
        weights = sorted(weights, key=lambda weight: weight.module is experts)
        self._weights, self._forwards = weights, forwards
        self._without_experts = weights if experts is None else [one for one in weights if one.module is not experts]
        self._lookup: expert_lookup.ExpertLookup | None = None
        self._lookup_is_known = experts is None
        self._sources: list[HostTensor] = []
        self._first_of_experts = 0  # of the sources
        self._offsets: list[int] = []  # of each source in the buffers
        offset = self.size_without_experts = 0
        for weight in weights:
            weight.assign(len(self._sources))
            for source in weight.sources():
                self._sources.append(source)
                self._offsets.append(offset)
                offset += -(-source.size // ALIGNMENT) * ALIGNMENT
            if weight.module is not experts:
                self.size_without_experts, self._first_of_experts = offset, len(self._sources)
        self.size = offset
        self.on_disk = any(weight.stored.on_disk for weight in weights)
        self._host_buffer: Any = None
        self._pinned: Any = None  # keeps the host buffer pinned
        self._buffer: Any = None  # on the device
        self._filled: Any = None  # the part of it that a copy writes
        self._views: list[Any] = []  # the tensors in it
        places = [place for weight in weights for place in weight.places()]
        self._guards = _entries([*places, *self.hook_entries()])
        self._host_guards = _entries(self.host_entries())
        # onload_ runs for every token, so these are plain tuples.
        self._swaps: dict[bool, list[tuple[dict[str, Any], str, Any]]] = {}  # by in_part

    def modules(self) -> list[Any]:
        """The modules whose weights are in the group."""
        return [weight.module for weight in self._weights]

    @property
    def nbytes(self) -> int:
        """Bytes that it has on the device now: as many as the largest group of its list."""
        return int(self._buffer.untyped_storage().nbytes())

    @classmethod
    def from_layer(cls, layer: Any) -> ModuleGroup | None:
        """The group of a layer as it is now; None for a layer that has nothing to stream or is left to accelerate."""
        inside = expert_lookup.inside(layer)
        device = module_hooks.hook_device(layer)
        alone = device is None and inside is not None  # a map that names the parts of the layer
        if alone:
            device = module_hooks.hook_device(inside)
        weights: list[OffloadedWeight] = []
        forwards: list[HookedForward] = []
        for part in layer.modules():
            if part is layer or "_hf_hook" not in vars(part):
                continue
            if device is None or module_hooks.hook_device(part) != device:
                return None
            if not _only_places(vars(part)["_hf_hook"]):  # another library's hook has to run
                return None
            hook = module_hooks.offload_hook(part)
            if hook is not None:
                if hook.offload_buffers or hook.place_submodules or hook.tied_params_names:
                    return None
                if not is_accelerates_forward(part):  # a ``forward`` around the hook's has to run
                    return None
                parametrized.settle(part, hook)
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        weight = OffloadedWeight.of(part, name, parameter, hook)
                        if weight is None:
                            return None
                        weights.append(weight)
            # Any other hook in a layer without a hook of its own brings its own inputs to the device.
            if "_old_forward" in vars(part) and (part is inside or not alone):
                forwards.append(HookedForward(part))
        if alone and any(weight.module is not inside for weight in weights):
            return None
        experts = next((weight.module for weight in weights if weight.module is inside), None)
        return cls(device, weights, forwards, experts) if weights else None

    def is_stale(self) -> bool:
        """Whether a weight, a hook or a weight's place on the host has changed since this group was created."""
        import torch

        if not (self._guards.check() and self._host_guards.check()):
            return True
        with torch._C.DisableTorchFunctionSubclass():  # bitsandbytes' parameters take a detour through Python
            return not all([weight.has_its_dtype() for weight in self._weights])

    def host_entries(self) -> list[tuple[dict[Any, Any], Any]]:
        """Dictionaries and keys under which the host keeps the weights."""
        stored = (weight.stored for weight in self._weights)
        return [(one.holder, one.key) for one in stored if one.holder is not None]

    def hook_entries(self) -> list[tuple[dict[Any, Any], Any]]:
        """Dictionaries and keys of the hooks that say where the host keeps the weights."""
        hooks = [vars(weight.hook) for weight in self._weights]
        return [(hook, key) for hook in hooks for key in ("weights_map", "offload")]

    def watch_outputs(self, on_output: Callable[[Any], None], require_in_backward: Callable[[], None]) -> None:
        """Call ``on_output`` with the outputs of modules with weights, in forwards that are ``watched``."""
        self.on_output, self.require_in_backward = on_output, require_in_backward
        modules = {weight.module for weight in self._weights}
        for forward in self._forwards:
            if forward.module in modules:
                forward.watch(on_output)

    def onload_(self, *, watched: bool = False) -> None:
        """Give the modules their weights on the device, and bypass the hooks inside the layer. Copies nothing."""
        for forward in self._forwards:
            looks_up = self.in_part and forward.module is self.experts
            forward.unwrap(watched=watched, instead=self._lookup if looks_up else None)
        swaps = self._swaps.get(self.in_part, ())
        if not swaps:
            weights = self._without_experts if self.in_part else self._weights
            for weight in weights:
                weight.onload_(self._views)
            if all(weight.is_reusable for weight in weights):
                self._swaps[self.in_part] = [weight.swap() for weight in weights]
        for parameters, name, parameter in swaps:
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
        """Allocate ``size`` bytes on the device, in the current stream's pool."""
        import torch

        if self._buffer is not None:
            torch_internals.resize(self._buffer, size)
            return
        with torch.inference_mode(False):
            self._buffer = torch.empty(max(size, self.size), dtype=torch.uint8, device=self.device)
            self._filled = self._buffer.data[: self.size]
            self._views = [
                _view(self._buffer, offset, source)
                for offset, source in zip(self._offsets, self._sources, strict=True)
            ]
        if size < self.size:  # in part; the views above cover everything
            torch_internals.resize(self._buffer, 0)
            torch_internals.resize(self._buffer, size)

    def free(self) -> None:
        """Free the memory on the device; the tensors in it stay, empty."""
        torch_internals.resize(self._buffer, 0)

    def copy_from_host(self) -> None:
        """Copy the group from the host, without waiting if its buffer there is pinned."""
        import torch

        # `_filled` has a version counter of its own: a second copy brings the same values, and autograd must not take
        # the tensors it kept for changed.
        with torch.no_grad():
            size = self.size_without_experts if self.in_part else self.size
            if self.on_disk:
                self._copy_from_disk(self._filled[:size])
            else:
                if self._host_buffer is None:
                    self._pack()
                self._filled[:size].copy_(self._host_buffer[:size], non_blocking=True)

    def copy_to(self, memory: Any) -> None:
        """Copy the whole group, which is on the device, to bytes there, in the order of the current stream."""
        import torch

        with torch.no_grad():
            memory[: self.size].copy_(self._filled)

    @contextlib.contextmanager
    def computing_in(self, memory: Any) -> Iterator[None]:
        """Inside, its modules, which are onloaded, compute with weights at these bytes, and nothing watches them."""
        views = [_view(memory, *place) for place in zip(self._offsets, self._sources, strict=True)]
        with contextlib.ExitStack() as stack:
            for weight in self._weights:
                parameters = weight.module._parameters
                stack.callback(parameters.__setitem__, weight.name, parameters[weight.name])
                parameters[weight.name] = weight.device_parameter(views)
            for forward in self._forwards:
                stack.enter_context(forward.unwatched())
            yield

    def swapped(self) -> Iterator[tuple[dict[Any, Any], str]]:
        """Dictionaries and keys of what is another object while the group is onloaded."""
        for weight in self._weights:
            yield weight.module._parameters, weight.name
        for forward in self._forwards:
            yield vars(forward.module), "forward"

    def looks_experts_up(self) -> bool:
        """Whether the layer can run with the group in part. Packs its host tensors to find out."""
        return self.lookup() is not None

    def lookup(self) -> expert_lookup.ExpertLookup | None:
        """What looks its experts up, if the layer can run with the group in part. Packs its host tensors."""
        if not self._lookup_is_known:
            self._lookup, self._lookup_is_known = self._new_lookup(), True
        return self._lookup

    def _new_lookup(self) -> expert_lookup.ExpertLookup | None:
        import torch

        memory = None
        if self.on_disk:
            if any(source.casts for source in self._sources[self._first_of_experts :]):
                return None
            tensors = [source.tensor for source in self._sources]
            mapped = [one for one in tensors[self._first_of_experts :] if expert_lookup.per_expert(one)]
        else:
            mapped = []
            if self._host_buffer is None:
                self._pack()
            tensors, memory = [source.tensor for source in self._sources], self._host_buffer
            if self.device.type != "cpu":
                memory = None if self._pinned is None else self._pinned.view_on(self.device)
                if memory is None:  # it could not be pinned: streaming all experts is faster than copying rows
                    return None
                tensors = [_view(memory, *place) for place in zip(self._offsets, self._sources, strict=True)]
        with torch.no_grad():
            tensors = [one if expert_lookup.per_expert(one) else one.to(self.device, copy=True) for one in tensors]
        own = [weight for weight in self._weights if weight.module is self.experts]
        forward = expert_lookup.forward_of(self.experts)
        assert forward is not None
        parameters = {weight.name: weight.device_parameter(tensors) for weight in own}
        return expert_lookup.ExpertLookup(self.experts, forward, parameters, self.device, mapped, memory)

    def _pack(self) -> None:
        """Move the layer's host tensors into one buffer, pinned if possible."""
        import torch

        with torch.inference_mode(False):
            host = torch.empty(self.size, dtype=torch.uint8)
            views = [_part(host, offset, source) for offset, source in zip(self._offsets, self._sources, strict=True)]
        for view, source in zip(views, self._sources, strict=True):
            source.copy_to(view)
        self._pinned = host_memory.pin(host, self.device)
        for weight in self._weights:
            weight.move_host_copy(views)  # frees the memory it had
        self._sources, self._host_buffer = [HostTensor(view) for view in views], host
        self._host_guards = _entries(self.host_entries())

    def _copy_from_disk(self, buffer: Any) -> None:
        """Copy from memory-mapped files, through pinned memory if the target is a GPU."""
        import torch

        target = buffer
        if self.device.type == "cuda":
            target = host_memory.staging(buffer.shape, torch.uint8)
        last = self._first_of_experts if self.in_part else None
        for offset, source in zip(self._offsets[:last], self._sources[:last], strict=True):
            source.copy_to(_view(target, offset, source))
        if target is not buffer:
            buffer.copy_(target, non_blocking=True)


def _entries(places: Iterable[tuple[dict[Any, Any], Any]]) -> Entries:
    found = Entries(keeps=True)
    for where, key in places:
        found.add(where, key, (None, str(key)))
    return found


def _view(buffer: Any, offset: int, source: HostTensor) -> Any:
    """The bytes of ``buffer`` from ``offset`` on, as a contiguous tensor of the dtype and shape of ``source``."""
    return buffer[offset : offset + source.size].view(source.dtype).view(source.shape)


def _part(host: Any, offset: int, source: HostTensor) -> Any:
    """:func:`_view` of a host buffer, with its own storage over the same memory, no larger than the view.

    Saving a state dict or copying a parameter handles whole storages, each with one dtype.
    """
    import torch

    if not source.size:
        return torch.empty(source.shape, dtype=source.dtype)
    return torch.from_numpy(host[offset : offset + source.size].numpy()).view(source.dtype).view(source.shape)


def _only_places(hook: Any) -> bool:
    """Whether an accelerate hook only places the module's weights and inputs."""
    return all(type(one).__name__ == "AlignDevicesHook" for one in getattr(hook, "hooks", (hook,)))
