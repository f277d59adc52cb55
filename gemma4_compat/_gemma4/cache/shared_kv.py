"""Keep the container in which Gemma 4's decoder layers share keys and values one and the same.

Code between the text model and a layer may rebuild the arguments: accelerate's hooks rebuild every mapping that no
skip key names, FSDP and FSDP2 every plain dict. A layer then writes into a copy that nothing reads.

A checkpoint keeps the arguments of its layer. If one of them leads to what the layer computes, neither is released:
see :func:`checkpointed_layer`.

:class:`Unshared` corrects what a cache reads about these layers.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, MutableMapping
from typing import Any

from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._gemma4.state import checkpointing

#: The argument in which layers hand keys and values to later layers.
NAME = "shared_kv_states"
#: How many layers do, in a text model's configuration.
_SHARED = "num_kv_shared_layers"


class SharedStates(UserDict[Any, Any]):
    """The caller's container in a type that is passed on unchanged: it sees every write, and reads come from it.

    accelerate's ``send_to_device`` lets anything with a ``to`` move itself; FSDP rebuilds plain dicts only. The values
    stay on the device that computed them: the layer that reads them brings them to its own.
    """

    def __init__(self, states: MutableMapping[Any, Any]) -> None:
        self.data = states  # type: ignore[assignment]  # not a copy, that is the point

    def to(self, *_: Any, **__: Any) -> SharedStates:
        return self


def decoder_layer(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's ``__call__``, before its hooks run. A checkpoint keeps what this passes on."""
    if _may_rebuild(self):
        args, kwargs = _protected(self, args, kwargs)
    return original(self, *args, **kwargs)


def checkpointed_layer(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's ``__call__``: if it is checkpointed, it gets a container of its own, of the same type.

    A layer that reads keys and values finds them there, when it is computed again as well. What another layer stores
    is handed on to the caller's container, and leaves its own: the checkpoint does not keep what its layer computed.
    """
    if not (self.training and getattr(self, checkpointing.FLAG, False)):
        return original(self, *args, **kwargs)
    given = [value for value in (*args, kwargs.get(NAME)) if isinstance(value, MutableMapping)]
    if len(given) != 1 or not _records_gradients():
        return original(self, *args, **kwargs)
    (states,) = given
    reads = self.self_attn.is_kv_shared_layer
    own: Any = type(states)(dict(states) if reads else {})  # type: ignore[call-arg]
    args = tuple(own if value is states else value for value in args)
    kwargs = {name: own if value is states else value for name, value in kwargs.items()}
    try:
        return original(self, *args, **kwargs)
    finally:
        states.update(own)  # also what a hook moved to the device of the layer
        if not reads:
            own.clear()


def _records_gradients() -> bool:
    import torch

    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def text_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The text model's ``forward``: hands the container safely to layers that sit inside another module.

    FSDP's class, and FSDP2 around a checkpoint wrapper, rebuild it before the layer is called.
    """
    handles = [
        wrapper.register_forward_pre_hook(_protected, prepend=True, with_kwargs=True)
        for wrapper in _wrappers(self.layers)
    ]
    try:
        return original(self, *args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _may_rebuild(layer: Any) -> bool:
    """Whether anything sees the arguments before attention does. If not, nothing is changed or traced."""
    return any(
        len(module._forward_pre_hooks) > 0 or getattr(module, "_hf_hook", None) is not None
        for module in (layer, layer.self_attn)
    )


def _wrappers(layers: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [
        layer
        for layer in layers
        if not isinstance(layer, GradientCheckpointingLayer) and "_orig_mod" not in layer._modules  # torch.compile's
    ]


def _protected(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the container in its safe type. 5.5.2 passes it by position, as the only mapping."""
    args = tuple(_safe(value) for value in args)
    return args, {name: _safe(value) if name == NAME else value for name, value in kwargs.items()}


def _safe(value: Any) -> Any:
    return SharedStates(value) if isinstance(value, MutableMapping) and not hasattr(value, "to") else value


def sharing_modes(original: Callable[..., list[str | None]], self: Any) -> list[str | None]:
    """For ``kv_sharing_modes`` of a text configuration: all layers may reuse those of another model. If no layer
    reuses any, an assistant model still gets the last ones of each kind.
    """
    if self.num_kv_shared_layers == self.num_hidden_layers:
        return ["reuse"] * self.num_hidden_layers
    modes = original(self)
    if not self.num_kv_shared_layers:
        for index in {kind: index for index, kind in enumerate(self.layer_types)}.values():
            modes[index] = "store"
    return modes


def shares_nothing(config: Any) -> bool:
    """Whether the text model's configuration explicitly says that no layer is KV-shared."""
    return getattr(config.get_text_config(decoder=True), _SHARED, None) == 0


class Unshared(PlainView):
    """The text model's part of ``config`` for a cache, as if KV-shared layers did not exist."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.get_text_config(decoder=True))

    def get_text_config(self, decoder: bool | None = None) -> Unshared:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == _SHARED:
            raise AttributeError(name)
        return super().__getattr__(name)
