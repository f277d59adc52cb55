"""Paging: the offloaded layers of a model travel to the device one ahead of the computation.

accelerate moves each tensor of each module by itself, out of pageable memory, when the module is called, and waits.
Here a layer is one *page*: all its offloaded tensors lie in one pinned buffer on the host and travel as one copy on a
stream of their own, while the layer before it computes. On the device there are at most two pages of a list of layers,
three in a backward pass, however many layers the list has.

What autograd keeps of a forward must be there again in the backward pass, and bitsandbytes keeps a 4-bit weight where
no hook for saved tensors sees it. So a page's tensors on the device are always the same objects. The memory below them
comes and goes (``UntypedStorage.resize_``, as in PyTorch's FSDP): taken away when the layer's forward is over, given
back and filled when a gradient reaches the layer: its output's, or that of a module in it, whichever is first.

During its layer's backward pass a page is shown as in the forward: checkpointing may compute the layer again, through
``layer.forward`` even, where no hook of a module is called (transformers 5.23).

Between two forwards the modules look as accelerate left them: weights on meta, hooks in place. Whoever uses a module
of a layer by itself, or reads its weights through the hook, gets them as before, and what was changed there is noticed
at the next forward. During a layer's forward the hooks inside it are out of the way.

The hooks that page belong to the model: they stay, and work, when the patch that installed them is undone.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._models import placement
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.idle_hooks import Forward, is_hooks_own
from gemma4_compat._quantization import quant_states

_ALIGNMENT = 512  # bytes; what the caching allocator gives, and more than any kernel asks for
_HELD = 2  # pages that a backward pass keeps: of the layer it is in, and of the one it comes from

# The two hooks of each paged layer.
_handles: weakref.WeakKeyDictionary[Any, tuple[Any, ...]] = weakref.WeakKeyDictionary()


def install(model: Any) -> int:
    """Page the offloaded layers of a dispatched model, of every ``nn.ModuleList`` in it; returns how many there are.

    A layer stays with accelerate's hooks where it computes on several devices, has offloaded buffers or tied weights,
    or no hook of its own that brings its inputs to its device.
    """
    import torch

    uninstall(model)
    found = 0
    inside: set[int] = set()  # modules that belong to pages of an outer list
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or id(module) in inside:
            continue
        layers = [layer for layer in module if any(placement.offload_hook(part) for part in layer.modules())]
        if layers:
            inside.update(id(part) for part in module.modules())
            # A tower runs once a prompt; in the language model the first layer follows the last, token after token.
            pager = Pager(layers, again="tower" not in name)
            for layer in layers:
                # Run as they are between the graphs of torch.compile, as accelerate's hooks are.
                before, after = torch.compiler.disable(pager.enter), torch.compiler.disable(pager.leave)
                _handles[layer] = (
                    layer.register_forward_pre_hook(before, prepend=True),
                    layer.register_forward_hook(after, always_call=True),
                )
            found += len(layers)
    return found


def uninstall(model: Any) -> None:
    """Leave the layers to accelerate's hooks."""
    for module in model.modules():
        forget(module)


def forget(layer: Any) -> None:
    """Leave one layer to accelerate's hook, or to nobody: it has none any more, and can be pickled again."""
    for handle in _handles.pop(layer, ()):
        handle.remove()


class Pager:
    """The pages of one list of layers, and which of them are on the device.

    Args:
        layers: in the order in which they run.
        again: the list runs again and again: after its last layer the first one is fetched.
    """

    def __init__(self, layers: list[Any], *, again: bool = False) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        # A deep copy of a layer has the same hooks and is not in here: it stays with accelerate's.
        self._positions = weakref.WeakKeyDictionary({layer: index for index, layer in enumerate(layers)})
        self._again = again
        self._pages: list[Page | None] = []  # by position; None: left to accelerate's hooks
        self._device: _Device | None = None
        self._size = 0  # bytes of the largest page: every one takes as much, so that each fits where another was
        self._ahead: Page | None = None  # fetched, and not used yet
        self._held: list[Page] = []  # by a backward pass

    def enter(self, layer: Any, _inputs: Any) -> None:
        """The hook before a layer's forward."""
        import torch

        recomputed = _in_backward()
        if not recomputed and self._held:  # a backward pass that failed: nobody told us that it is over
            self._backward_ends()
        position = self._positions.get(layer)
        page = None if position is None else self._page(position, layer)
        if position is None or page is None or page.shown:
            return
        if recomputed:
            self._hold(page)
        self._need(page, self._neighbour(position, -1 if recomputed else 1))
        page.show(watched=torch.is_grad_enabled() and not recomputed)

    def leave(self, layer: Any, _inputs: Any, output: Any) -> None:
        """The hook after a layer's forward, also after one that failed (``output`` is None then)."""
        position = self._positions.get(layer)
        page = self._pages[position] if position is not None and self._pages else None
        if position is None or page is None or not page.shown:
            return
        page.hide()
        page.begins(output)
        if page not in self._held:  # recomputed by checkpointing: its backward comes next
            self._free(page)

    def _watch(self, position: int, page: Page, output: Any) -> None:
        """Have the page when the gradient of ``output``, of a layer or of a module in it, is there."""
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._backward_begins, position, page))

    def _backward_begins(self, position: int, page: Page, _gradient: Any) -> None:
        assert self._device is not None
        if page in self._held and page.loaded:
            self._device.wait_for(page)  # the stream of this gradient may be another
            return
        self._hold(page)  # which frees what is done, so before more is fetched
        self._need(page, self._neighbour(position, -1))
        if not page.shown:
            page.show()

    def _hold(self, page: Page) -> None:
        """Keep a page until the backward pass is two layers on, or over.

        The engine runs nodes in the reverse order of their creation: when the gradient of a layer's output is there,
        nothing of the layers after it is left to do.
        """
        import torch

        if page not in self._held:
            self._held.append(page)
            while len(self._held) > _HELD:
                self._let_go(self._held.pop(0))
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        while self._held:
            self._let_go(self._held.pop())

    def _let_go(self, page: Page) -> None:
        if page.shown:
            page.hide()
        self._free(page)

    def _need(self, page: Page, following: Page | None) -> None:
        """Have ``page`` on the device for what the current stream does next, and fetch ``following`` meanwhile."""
        import torch

        assert self._device is not None
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead is not page:
            if ahead is following:
                self._ahead = ahead
            else:
                self._free(ahead)
        if not page.loaded:
            self._device.load(page, self._size)
        self._device.wait_for(page)
        if following is not None and not following.loaded:
            try:
                self._device.load(following, self._size)
            except torch.OutOfMemoryError:
                return  # fetched when it is needed
            self._ahead = following

    def _free(self, page: Page) -> None:
        assert self._device is not None
        self._device.free(page)

    def _neighbour(self, position: int, step: int) -> Page | None:
        """The page that runs after (before, with ``step`` -1) the one at ``position``; None at an end."""
        last = len(self._pages) - 1
        while True:
            if position == (last if step > 0 else 0):
                if step < 0 or not self._again:
                    return None
                position = 0
            else:
                position += step
            page = self._pages[position]
            if page is not None:
                return page

    def _page(self, position: int, layer: Any) -> Page | None:
        if not self._pages:
            for reference in self._layers:
                self._pages.append(self._new_page(len(self._pages), reference()))
        page = self._pages[position]
        if page is not None and not page.shown and page.is_stale():
            if page in self._held:
                self._held.remove(page)
            if page is self._ahead:
                self._ahead = None
            self._free(page)
            page = self._pages[position] = self._new_page(position, layer)
        return page

    def _new_page(self, position: int, layer: Any) -> Page | None:
        import torch

        page = None if layer is None else Page.of(layer)
        if page is None:
            return None
        if self._device is None:
            self._device = _Device(page.device)
        if page.device != self._device.device:  # each list of layers pages to one device
            return None
        self._size = max(self._size, page.size)
        page.watch(torch.compiler.disable(functools.partial(self._watch, position, page)))
        return page


class Page:
    """The offloaded tensors of one layer, on the host and, for a time, on the device.

    Attributes:
        device: where the layer computes.
        size: bytes.
        loaded: its memory on the device is there, and filled as soon as the copy that was issued has arrived.
        shown: the layer's modules have their weights, and no hooks.
        begins: called with an output of the layer; has the page there when its gradient is.
    """

    begins: Callable[[Any], None]

    def __init__(self, device: Any, weights: list[_Weight], forwards: list[Forward]) -> None:
        self.device = device
        self.loaded = self.shown = False
        self.arrived: Any = None  # the event after the copy
        self._weights, self._forwards = weights, forwards
        self._sources: list[Any] = []  # host tensors
        self._offsets: list[int] = []  # of each in the page
        offset = 0
        for weight in weights:
            for tensor in weight.tensors():
                self._sources.append(tensor)
                self._offsets.append(offset)
                offset += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.size = offset
        self._on_disk = any(weight.stored.on_disk for weight in weights)
        self._host: Any = None
        self._memory: Any = None  # keeps the host's buffer pinned
        self._buffer: Any = None
        self._filled: Any = None  # what of it a copy writes
        self._views: list[Any] = []
        # Gone through for every token, so these are plain tuples.
        self._current = [weight.current() for weight in weights]
        self._swaps: list[tuple[dict[str, Any], str, Any]] = []

    @classmethod
    def of(cls, layer: Any) -> Page | None:
        """The page of a layer as it is now; None where it has to be left to accelerate's hooks, or has nothing."""
        device = placement.hook_device(layer)
        weights: list[_Weight] = []
        forwards: list[Forward] = []
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
                if not is_hooks_own(part):  # somebody's own forward is around the hook's, and has to run
                    return None
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        weight = _Weight.of(part, name, parameter, hook)
                        if weight is None:
                            return None
                        weights.append(weight)
            if "_old_forward" in vars(part):
                forwards.append(Forward(part))
        return cls(device, weights, forwards) if weights else None

    def is_stale(self) -> bool:
        """Whether somebody has changed a weight, a hook or where weights are kept since this page was made."""
        for parameters, name, meta, state, attributes, forward, hooks, hook, places, held, key, value in self._current:
            if (
                parameters.get(name) is not meta
                or attributes.get("_hf_hook") is not hooks
                or attributes.get("forward") is not forward
                or hook.weights_map is not places
                or not hook.offload
                or (held is not None and held.get(key) is not value)
                or (state is not None and meta.quant_state is not state)
            ):
                return True
        return False

    def watch(self, begins: Callable[[Any], None]) -> None:
        """Have ``begins`` called with the outputs of modules with weights, in forwards that are ``watched``."""
        self.begins = begins
        modules = {weight.module for weight in self._weights}
        for forward in self._forwards:
            if forward.module in modules:
                forward.watch(begins)

    def show(self, *, watched: bool = False) -> None:
        """Give the modules their weights on the device, and take the hooks inside the layer out of the way."""
        for forward in self._forwards:
            forward.unwrap(watched=watched)
        if not self._swaps:
            for weight in self._weights:
                weight.show(self._views)
            if all(weight.lasts for weight in self._weights):
                self._swaps = [weight.swap() for weight in self._weights]
        for parameters, name, shown in self._swaps:
            parameters[name] = shown
        self.shown = True

    def hide(self) -> None:
        """The modules as accelerate left them."""
        for weight in self._weights:
            weight.hide()
        for forward in self._forwards:
            forward.wrap()
        self.shown = False

    def allocate(self, size: int) -> None:
        """Take ``size`` bytes on the device, in the current stream's pool."""
        import torch

        if self._buffer is not None:
            self._buffer.untyped_storage().resize_(size)
            return
        with torch.inference_mode(False):
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self._filled = self._buffer.data[: self.size]
            self._views = [
                _view(self._buffer, offset, like) for offset, like in zip(self._offsets, self._sources, strict=True)
            ]
            first = 0
            for weight in self._weights:
                first = weight.place(first)

    def release(self) -> None:
        """Give the memory on the device back; the tensors in it stay, empty."""
        self._buffer.untyped_storage().resize_(0)

    def fill(self) -> None:
        """Copy the page from the host, without waiting where it is pinned."""
        import torch

        # `_filled` counts its own versions: a page that was filled again is what it was, and autograd shall not take
        # what it kept of it for changed.
        with torch.no_grad():
            if self._on_disk:
                self._read(self._filled)
            else:
                if self._host is None:
                    self._pack()
                self._filled.copy_(self._host, non_blocking=True)

    def _pack(self) -> None:
        """Move what the host keeps of the layer into one buffer, pinned where that can be done."""
        import torch

        with torch.inference_mode(False):
            host = torch.empty(self.size, dtype=torch.uint8)
            views = [_view(host, offset, like) for offset, like in zip(self._offsets, self._sources, strict=True)]
        for view, tensor in zip(views, self._sources, strict=True):
            view.copy_(tensor)
        self._memory = host_memory.pin(host, self.device)
        for weight in self._weights:
            weight.keep(views)  # and the memory they had is free
        self._sources, self._host = views, host
        self._current = [weight.current() for weight in self._weights]

    def _read(self, buffer: Any) -> None:
        """Read the page from the disk: memory-mapped files, by way of pinned memory on the way to a GPU."""
        import torch

        target = buffer
        if self.device.type == "cuda":
            target = host_memory.staging((self.size,), torch.uint8)
        for offset, tensor in zip(self._offsets, self._sources, strict=True):
            _view(target, offset, tensor).copy_(tensor)
        if target is not buffer:
            buffer.copy_(target, non_blocking=True)


class _Weight:
    """One offloaded parameter of a module in a page, with what bitsandbytes keeps beside it.

    Attributes:
        module: whose parameter it is.
        stored: where the host keeps its data.
    """

    def __init__(self, module: Any, name: str, meta: Any, hook: Any, stored: Any, beside: list[Any]) -> None:
        self.module, self.stored = module, stored
        self._name, self._meta, self._hook = name, meta, hook
        self._hooks, self._map = vars(module)["_hf_hook"], hook.weights_map
        self._forward = vars(module)["forward"]
        self._value, self._state = stored.raw, vars(meta).get("quant_state")
        self._beside = beside  # scales and code books
        self._first = 0  # of its tensors in the page
        self._shown: Any = None

    @classmethod
    def of(cls, module: Any, name: str, parameter: Any, hook: Any) -> _Weight | None:
        """None for a parameter that cannot be part of a page: not on meta, scales lost, of an unknown class."""
        import torch

        if parameter.device.type != "meta":
            return None
        stored = host_memory.stored(hook.weights_map, name)
        kind = type(parameter).__name__
        beside: list[Any] = []
        if kind == "Params4bit":
            state = parameter.quant_state
            if not parameter.bnb_quantized or state is None or quant_states.is_packed(state):
                return None
            if not quant_states.is_pristine(state):
                return None
            beside = list(quant_states.tensors(state))
        elif kind == "Int8Params":
            scales = vars(parameter).get("SCB")
            if scales is None or scales.device.type == "meta":
                try:
                    scales = host_memory.stored(hook.weights_map, "SCB").tensor
                except KeyError:
                    return None
                vars(scales)[quant_states.PRISTINE] = True
                parameter.SCB = scales  # where bitsandbytes-int8-meta-scales keeps them
            beside = [scales]
        elif type(parameter) is not torch.nn.Parameter:
            return None
        if stored.raw.dtype != parameter.dtype:  # on disk in another one: would be converted for every forward
            return None
        return cls(module, name, parameter, hook, stored, beside)

    def tensors(self) -> Iterator[Any]:
        """What of it is in the page, the data first."""
        yield self._value
        yield from self._beside

    def place(self, first: int) -> int:
        """Its tensors are in the page from position ``first`` on; returns the position after them."""
        self._first = first
        return first + 1 + len(self._beside)

    def keep(self, views: list[Any]) -> None:
        """From now on the host keeps its tensors in the page's own buffer."""
        data, *beside = self._of(views)
        if self.stored.holder is not None:
            self.stored.holder[self.stored.key] = data
        self._value = self.stored.raw = data
        if type(self._meta).__name__ == "Params4bit":
            known = {id(old): new for old, new in zip(self._beside, beside, strict=True)}
            quant_states.replace_tensors(self._meta.quant_state, known)
            self._beside = beside

    def current(self) -> tuple[Any, ...]:
        """What :meth:`Page.is_stale` looks at."""
        attributes, stored = vars(self.module), self.stored
        return (
            *(attributes["_parameters"], self._name, self._meta, self._state),
            *(attributes, self._forward, self._hooks, self._hook, self._map),
            *(stored.holder, stored.key, self._value),
        )

    @property
    def lasts(self) -> bool:
        """Whether the parameter on the device serves for more than one forward."""
        # On a CPU bitsandbytes may repack a 4-bit weight in its forward; an 8-bit one it always takes apart.
        return self._shown is not None and self._shown.device.type != "cpu" and not self._is_int8

    @property
    def _is_int8(self) -> bool:
        return type(self._meta).__name__ == "Int8Params"

    def swap(self) -> tuple[dict[str, Any], str, Any]:
        """Where the parameter on the device goes, and that parameter."""
        return self.module._parameters, self._name, self._shown

    def show(self, views: list[Any]) -> None:
        if self._shown is None:
            self._shown = self._on_device(views)
        self.module._parameters[self._name] = self._shown

    def hide(self) -> None:
        self.module._parameters[self._name] = self._meta
        if not self.lasts:
            self._shown = None
        state = vars(self.module).get("state")
        if self._is_int8 and state is not None:
            # The forward's own belongs to its graph, and is there again in the backward pass.
            self.module.state = copy.copy(state)
            self.module.state.reset_grads()
            self.module.state.idx = None

    def _of(self, tensors: list[Any]) -> list[Any]:
        return tensors[self._first : self._first + 1 + len(self._beside)]

    def _on_device(self, views: list[Any]) -> Any:
        import torch

        data, *beside = self._of(views)
        with torch.inference_mode(False):
            parameter = torch.Tensor._make_subclass(type(self._meta), data.data, False)
            vars(parameter).update(vars(self._meta))
            if type(self._meta).__name__ == "Params4bit":
                known = {id(old): new for old, new in zip(self._beside, beside, strict=True)}
                parameter.quant_state = quant_states.with_tensors(self._meta.quant_state, known)
            elif type(self._meta).__name__ == "Int8Params":
                parameter.CB, parameter.SCB = parameter.data, beside[0]
        return parameter


class _Device:
    """The side of a device on which pages come and go.

    Pages are allocated, and their memory is used again, on the stream of the copies alone. A copy waits for whatever
    was computed with the pages that were freed before it; a computation waits for its page's copy.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self.device = device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._computed: dict[Any, Any] = {}  # by stream: the event after its last use of a page

    def load(self, page: Page, size: int) -> None:
        import torch

        if self._copies is None:
            page.allocate(size)
            page.fill()
        else:
            with torch.cuda.stream(self._copies):
                page.allocate(size)
                for event in self._computed.values():
                    self._copies.wait_event(event)
                page.fill()
                page.arrived = page.arrived or torch.cuda.Event()
                page.arrived.record(self._copies)
        page.loaded = True

    def wait_for(self, page: Page) -> None:
        import torch

        if self._copies is not None:
            torch.cuda.current_stream(self.device).wait_event(page.arrived)

    def free(self, page: Page) -> None:
        import torch

        if not page.loaded:
            return
        if self._copies is not None:
            stream = torch.cuda.current_stream(self.device)
            event = self._computed.get(stream)
            if event is None:
                event = self._computed[stream] = torch.cuda.Event()
            event.record(stream)
        page.release()
        page.loaded = False


def _view(buffer: Any, offset: int, like: Any) -> Any:
    """The bytes of ``buffer`` from ``offset`` on, as a contiguous tensor of the dtype and shape of ``like``."""
    size = like.numel() * like.element_size()
    return buffer[offset : offset + size].view(like.dtype).view(like.shape)


def _only_places(hook: Any) -> bool:
    """Whether an accelerate hook does nothing but place the module's weights and inputs."""
    return all(type(one).__name__ == "AlignDevicesHook" for one in getattr(hook, "hooks", (hook,)))


def _tensors(output: Any) -> Iterator[Any]:
    import torch

    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)


def _in_backward() -> bool:
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
