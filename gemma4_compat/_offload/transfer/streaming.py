"""Streaming: each offloaded layer of a model is copied to the device while the layer before it computes.

accelerate moves each tensor of each module on its own, from pageable memory, when the module is called, and waits.
Here a layer is one *module group* (:mod:`module_groups`): its offloaded tensors travel as one copy from pinned memory,
on a separate stream. A group takes two steps to its layer:

* *prefetch*: :meth:`CopyStream.start_copy` allocates its memory on the device and issues the copy.
* *onload*: :meth:`CopyStream.wait_for_copy`, then the layer's modules get the weights.

A list of layers has at most two groups on the device, however many layers it has. A group's memory is freed after the
layer's forward. It is onloaded again by the first gradient of its or a submodule's output, and freed by that of the
layer before it.

If a step has few tokens and needs no gradients, a layer with experts is onloaded in part, without them
(:mod:`gemma4_compat._offload.transfer.expert_lookup`).

The last group of a forward with gradients stays: the backward pass begins with it. During its layer's backward pass a
group is onloaded as in the forward: checkpointing may compute the layer again, even through ``layer.forward``, which
calls no module hooks (transformers 5.23).

One thread at a time is in a model's streamed layers (:mod:`gemma4_compat._offload.model_lock`). Backward passes that
the engine interleaves each keep their own groups. Groups that the graph of a gradient goes through (create_graph) stay
on the device as long as that graph lives.

Between two forwards the modules look as accelerate left them: weights on meta, hooks in place. Code that uses a module
of a layer on its own, or reads its weights through the hook, gets them as before. The next forward notices any
changes. During a layer's forward the hooks inside it are bypassed.

The streaming hooks belong to the model: they stay, and work, when the patch that installed them is reverted.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._gemma4.state import contents
from gemma4_compat._offload import model_lock, torch_internals
from gemma4_compat._offload.model_lock import ModelLock
from gemma4_compat._offload.transfer import expert_lookup
from gemma4_compat._offload.transfer.copy_stream import CopyStream
from gemma4_compat._offload.transfer.module_groups import ModuleGroup

_HOOKS = attached.STREAMING
# What each layer is streamed by, which its hooks keep alive.
_streamers: weakref.WeakKeyDictionary[Any, weakref.ref[LayerStreamer]] = weakref.WeakKeyDictionary()


def install(model: Any, lock: ModelLock | None = None) -> int:
    """Stream the offloaded layers of every ``nn.ModuleList`` in a dispatched model; returns the number of layers.

    Their forwards take the model's ``lock``, or a new one if it has none.

    A layer stays with accelerate's hooks if it computes on several devices, has offloaded buffers or tied weights, or
    has no hook of its own that brings its inputs to its device.
    """
    import torch

    uninstall(model)
    lock = ModelLock() if lock is None else lock
    found = 0
    inside: set[int] = set()  # modules that belong to groups of an outer list
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or id(module) in inside:
            continue
        layers = [layer for layer in module if any(module_hooks.offload_hook(part) for part in layer.modules())]
        if layers:
            inside.update(id(part) for part in module.modules())
            # A tower runs once per prompt; in the language model the first layer follows the last, token after token.
            streamer = LayerStreamer(layers, cyclic="tower" not in name, lock=lock)
            for layer in layers:
                before = torch_internals.uncompiled(streamer.pre_forward)
                after = torch_internals.uncompiled(streamer.post_forward)
                _streamers[layer] = weakref.ref(streamer)
                model_lock.guard(layer, lock)
                _HOOKS.add(
                    layer,
                    layer.register_forward_pre_hook(before, prepend=True),
                    layer.register_forward_hook(after, always_call=True),
                )
            found += len(layers)
    return found


def uninstall(model: Any) -> None:
    """Return the layers to accelerate's hooks."""
    for module in model.modules():
        forget(module)


def forget(layer: Any) -> None:
    """Remove the streaming hooks of one layer. If accelerate's hook is also gone, it can be pickled again."""
    if _streamers.pop(layer, None) is not None:
        model_lock.release(layer)
    _HOOKS.remove(layer)


def is_streamed(layer: Any) -> bool:
    """Whether a layer has the streaming hooks. Its calls take the model's lock."""
    return layer in _HOOKS


def group_of(layer: Any) -> ModuleGroup | None:
    """The group of a layer as it is now; None for one that is not streamed."""
    reference = _streamers.get(layer)
    streamer = None if reference is None else reference()
    return None if streamer is None else streamer.group_of(layer)


def streamers(model: Any) -> list[LayerStreamer]:
    """The streamers of a model's lists of layers."""
    known = dict(_streamers)
    found = (known[module]() for module in walk.modules(model) if module in known) if known else ()
    return list(dict.fromkeys(streamer for streamer in found if streamer is not None))


def slots(model: Any) -> int:
    """Bytes on the device for streamed layers: for the one that runs and for the next."""
    return sum(2 * streamer.buffer_size for streamer in streamers(model))


def streamed_modules(model: Any) -> dict[Any, str]:
    """Every module whose weights a streamer has in a group: ``"disk"`` if a copy reads files, else ``"memory"``."""
    return {
        module: "disk" if group.on_disk else "memory"
        for streamer in streamers(model)
        for group in streamer.groups()
        for module in group.modules()
    }


@contextlib.contextmanager
def captured(found: list[LayerStreamer]) -> Iterator[None]:
    """For capturing a forward as a CUDA graph: the graph has everything it needs, and nothing is left over from it.

    Enter it before the capture begins. Inside the capture, enter :meth:`LayerStreamer.forked`.
    """
    for streamer in found:
        streamer.before_capture()
    try:
        yield
    finally:
        for streamer in found:
            streamer.after_capture()


class LayerStreamer:
    """The module groups of one list of layers: when each is prefetched, onloaded and offloaded.

    Args:
        layers: in the order in which they run.
        cyclic: the list runs repeatedly: its first layer is prefetched after its last.
        lock: the model's, which its other lists share.
    """

    def __init__(self, layers: list[Any], *, cyclic: bool = False, lock: ModelLock | None = None) -> None:
        self._lock = ModelLock() if lock is None else lock
        self._layers = [weakref.ref(layer) for layer in layers]
        # A deep copy of a layer has the same hooks and is not in here: it stays with accelerate's hooks.
        self._positions = weakref.WeakKeyDictionary({layer: index for index, layer in enumerate(layers)})
        self._cyclic = self._again = cyclic
        self._groups: list[ModuleGroup | None] = []  # by position; None: left to accelerate's hooks
        self._copies: CopyStream | None = None
        # Bytes of the largest group, and the same without experts. Every group takes that much, so each fits where
        # another was.
        self.buffer_size = self._part_size = 0
        self._prefetched: ModuleGroup | None = None  # not used yet
        self._kept: dict[int, ModuleGroup | None] = {}  # of the layer a backward pass is in, by its graph task
        self._in_graphs: list[ModuleGroup] = []  # once per graph of a gradient (create_graph) that has its weights

    def pre_forward(self, layer: Any, _inputs: Any) -> None:
        """The hook before a layer's forward: onload its group, prefetch the next one."""
        import torch

        recomputed = torch_internals.graph_task() != -1  # in a backward pass
        position = self._positions.get(layer)
        group = self.group_of(layer)
        if position is None or group is None or group.onloaded:
            return
        if recomputed:
            self._keep(group)
        watched = torch.is_grad_enabled() and not recomputed
        stays = watched and self._is_last(position)  # a backward pass may begin with it
        in_part = not recomputed and self._in_part(group, layer, _inputs)
        following = None if stays else self._neighbour(position, -1 if recomputed else 1)
        ends = position == len(self._groups) - 1 and not recomputed and not torch.is_grad_enabled()
        next_in_part = in_part or ends  # a token follows a prompt
        self._require(group, following, in_part=in_part, next_in_part=next_in_part)
        group.onload_(watched=watched)

    def post_forward(self, layer: Any, _inputs: Any, output: Any) -> None:
        """The hook after a layer's forward, also after a failed one (``output`` is None then): offload its group."""
        position = self._positions.get(layer)
        group = self._groups[position] if position is not None and self._groups else None
        if position is None or group is None or not group.onloaded:
            return
        group.offload_()
        group.on_output(output)
        if self._is_kept(group):  # recomputed by checkpointing: its backward comes next
            return
        if self._is_last(position) and any(tensor.requires_grad for tensor in contents.tensors_in(output)):
            self._prefetched = group
        else:
            self._free(group)

    def group_of(self, layer: Any) -> ModuleGroup | None:
        """The group of a layer of the list; a new one if the layer has changed."""
        position = self._positions.get(layer)
        return None if position is None else self._group(position, layer)

    def groups(self) -> list[ModuleGroup]:
        """The groups, made in the first forward."""
        return [group for group in self._groups if group is not None]

    def before_capture(self) -> None:
        """Leave nothing on the device, and no earlier event to wait for."""
        self._again, self._cyclic = self._cyclic, False
        if self._copies is not None:
            if self._prefetched is not None and not self._is_kept(self._prefetched):
                self._free(self._prefetched)
            self._prefetched = None
            self._copies.synchronize()
            self._copies.forget_computed()

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Inside a capture: copies also belong to it, and are over when it ends."""
        if self._copies is None:
            yield
            return
        self._copies.follow_current_stream()
        try:
            yield
        finally:  # a capture whose streams have not joined again cannot even be ended
            self._copies.join_current_stream()

    def settled(self, settle: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """Inside, ``settle`` is called before weights are freed, to launch everything the layer computes."""
        return contextlib.nullcontext() if self._copies is None else in_place.assigned(self._copies, "settle", settle)

    def after_capture(self) -> None:
        """Free what a failed capture left on the device, and forget its events."""
        self._cyclic = self._again
        if self._copies is not None:
            for group in self.groups():
                if group.on_device and not self._is_kept(group):
                    if group.onloaded:
                        group.offload_()
                    group.free()
                    group.on_device = False
            self._prefetched = None
            self._copies.forget_computed()

    def _watch_gradients(self, position: int, group: ModuleGroup, output: Any) -> None:
        """Onload the group when a gradient reaches ``output``, the output of a layer or of a module in it."""
        for tensor in contents.tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._backward_begins, position, group))

    def _backward_begins(self, position: int, group: ModuleGroup, gradient: Any) -> None:
        if gradient.requires_grad:  # create_graph: no hook says when the gradient's own graph needs the weights
            gradient.register_hook(_InGraph(self, group))
        self._require_in_backward(position, group)

    def _require_in_backward(self, position: int, group: ModuleGroup) -> None:
        assert self._copies is not None
        if group is self._kept.get(torch_internals.graph_task()) and group.on_device:
            self._copies.wait_for_copy(group)  # the stream of this gradient may be another
            return
        self._keep(group)  # frees what is done, so before more is prefetched
        self._require(group, self._neighbour(position, -1))
        if not group.onloaded:
            group.onload_()

    def _keep(self, group: ModuleGroup) -> None:
        """Keep a group until the backward pass is in the layer before it, or over.

        The engine runs nodes in the reverse order of their creation: when the gradient of a layer's output exists, the
        layers after it are done.
        """
        task = torch_internals.graph_task()
        if task not in self._kept:
            self._lock.begin_backward(self._backward_ends)
        done, self._kept[task] = self._kept.get(task), group
        self._release(done)

    def _is_kept(self, group: ModuleGroup) -> bool:
        return group in self._in_graphs or group in self._kept.values()

    def keep_for_graph(self, group: ModuleGroup) -> None:
        """Keep the group's memory on the device until :meth:`graph_is_gone` was called as often as this."""
        self._in_graphs.append(group)

    def graph_is_gone(self, group: ModuleGroup) -> None:
        """A gradient's graph is deleted: free the group if nothing else needs it, now or at the end of its use."""
        self._in_graphs.remove(group)
        self._lock.when_free(functools.partial(self._free_unused, group))

    def _free_unused(self, group: ModuleGroup) -> None:
        if group is not self._prefetched and not group.onloaded and not self._is_kept(group):
            if self._copies is not None:
                self._copies.synchronize()  # any stream may have computed with it
            self._free(group)

    def _backward_ends(self, task: int) -> None:
        self._release(self._kept.pop(task, None))

    def _release(self, group: ModuleGroup | None) -> None:
        if group is None or group in self._kept.values():  # by another backward pass
            return
        if group.onloaded:
            group.offload_()
        if group not in self._in_graphs:
            self._free(group)

    def _in_part(self, group: ModuleGroup, layer: Any, inputs: Any) -> bool:
        """Whether the layer's next forward looks its experts up."""
        if group.experts is None or expert_lookup.inside(layer) is not group.experts:
            return False
        return expert_lookup.few_tokens(group.experts, layer, inputs) and group.looks_experts_up()

    def _require(
        self, group: ModuleGroup, following: ModuleGroup | None, *, in_part: bool = False, next_in_part: bool = False
    ) -> None:
        """Have ``group`` on the device for what the current stream does next, and prefetch ``following``.

        ``in_part``: without its experts, if it is not there as a whole; ``next_in_part`` is the same for
        ``following``.
        """
        assert self._copies is not None
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched is not group:
            if prefetched is following:
                self._prefetched = prefetched
            elif not self._is_kept(prefetched):
                self._free(prefetched)
        if group.in_part and not in_part:
            self._free(group)
        if not group.on_device:
            self._start_copy(group, in_part=in_part)
        self._copies.wait_for_copy(group)
        if following is not None:
            if following.in_part and not next_in_part and following is self._prefetched:
                self._prefetched = None
                self._free(following)
            if not following.on_device:
                self._prefetch(following, in_part=next_in_part and following.looks_experts_up())

    def _start_copy(self, group: ModuleGroup, *, in_part: bool) -> None:
        assert self._copies is not None
        group.in_part = in_part
        self._copies.start_copy(group, self._part_size if in_part else self.buffer_size)

    def _prefetch(self, group: ModuleGroup, *, in_part: bool) -> None:
        import torch

        try:
            self._start_copy(group, in_part=in_part)
        except torch.OutOfMemoryError:
            return  # copied when it is needed
        self._prefetched = group

    def _free(self, group: ModuleGroup) -> None:
        assert self._copies is not None
        self._copies.free(group)

    def _neighbour(self, position: int, step: int) -> ModuleGroup | None:
        """The group that runs after the one at ``position`` (before it if ``step`` is -1); None at an end."""
        last = len(self._groups) - 1
        while True:
            if position == (last if step > 0 else 0):
                if step < 0 or not self._cyclic:
                    return None
                position = 0
            else:
                position += step
            group = self._groups[position]
            if group is not None:
                return group

    def _is_last(self, position: int) -> bool:
        """Whether this is the last layer of a list that runs again."""
        return self._cyclic and not any(self._groups[position + 1 :])

    def _group(self, position: int, layer: Any) -> ModuleGroup | None:
        """The group of a layer; a new one if the layer has changed."""
        if not self._groups:
            for reference in self._layers:
                self._groups.append(self._new_group(len(self._groups), reference()))
        group = self._groups[position]
        if group is not None and not group.onloaded and group.is_stale():
            self._kept = {task: None if kept is group else kept for task, kept in self._kept.items()}
            if group is self._prefetched:
                self._prefetched = None
            if group not in self._in_graphs:
                self._free(group)
            group = self._groups[position] = self._new_group(position, layer)
        return group

    def _new_group(self, position: int, layer: Any) -> ModuleGroup | None:
        import torch

        group = None if layer is None else ModuleGroup.from_layer(layer)
        if group is None:
            return None
        if self._copies is None:
            self._copies = CopyStream(group.device)
        if group.device != self._copies.device:  # each list of layers streams to one device
            return None
        self.buffer_size = max(self.buffer_size, group.size)
        self._part_size = max(self._part_size, group.size_without_experts)
        group.watch_outputs(
            torch.compiler.disable(functools.partial(self._watch_gradients, position, group)),
            functools.partial(self._require_in_backward, position, group),
        )
        return group


class _InGraph:
    """A gradient hook that does nothing: the gradient's graph (create_graph) holds it as long as the graph lives."""

    def __init__(self, streamer: LayerStreamer, group: ModuleGroup) -> None:
        self._streamer, self._group = streamer, group
        streamer.keep_for_graph(group)

    def __call__(self, _gradient: Any) -> None: ...

    def __del__(self) -> None:
        self._streamer.graph_is_gone(self._group)
