"""The offloaded weights of a module group, and their tensors on the host."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat._offload import host_memory


class HostTensor:
    """A tensor on the host, and its dtype on the device.

    Args:
        tensor: as it is stored.
        casts: the dtypes it passes through on its way to the device.
    """

    def __init__(self, tensor: Any, casts: tuple[Any, ...] = ()) -> None:
        self.shape, self.dtype = tensor.shape, casts[-1] if casts else tensor.dtype
        self.size: int = tensor.numel() * self.dtype.itemsize  # bytes, on the device
        self.tensor, self.casts = tensor, casts

    def copy_to(self, view: Any) -> None:
        """Copy it to a device tensor of the device dtype."""
        view.copy_(host_memory.cast(self.tensor, self.casts[:-1]))


class OffloadedWeight:
    """One offloaded parameter of a module in a group, with its quantization tensors.

    Attributes:
        module: the module with the parameter.
        name: of the parameter.
        hook: the accelerate hook that offloads it.
        stored: where the host keeps its data.
    """

    def __init__(self, module: Any, name: str, meta: Any, hook: Any, stored: Any, quantization: list[Any]) -> None:
        self.module, self.stored = module, stored
        self.name, self._meta, self.hook = name, meta, hook
        self._value, self._state = stored.raw, vars(meta).get("quant_state")
        self._dtype = meta.dtype
        self._quantization = quantization  # scales and code books
        self._first = 0  # position of its tensors in the group
        self._parameter: Any = None  # on the device

    @classmethod
    def of(cls, module: Any, name: str, parameter: Any, hook: Any) -> OffloadedWeight | None:
        """None for a parameter that cannot be in a group: not on meta, without its scales, or of an unknown class."""
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
        # The parameter's dtype differs from the stored one if the model was cast since (model.float()).
        same = self._value.dtype == self._dtype and not self.stored.casts
        yield HostTensor(self._value, () if same else (*self.stored.casts, self._dtype))
        for tensor in self._quantization:
            yield HostTensor(tensor)

    def assign(self, first: int) -> None:
        """Use the group's tensors from position ``first`` on."""
        self._first = first

    def move_host_copy(self, views: list[Any]) -> None:
        """Make the host keep its tensors in the group's buffer from now on."""
        data, *quantization = self._own(views)
        self.stored.replace(data)
        self._value = data
        if type(self._meta).__name__ == "Params4bit":
            known = {id(old): new for old, new in zip(self._quantization, quantization, strict=True)}
            quant_states.replace_tensors(self._meta.quant_state, known)
            self._quantization = quantization

    def places(self) -> Iterator[tuple[dict[Any, Any], str]]:
        """Dictionaries and keys that say what the weight is, and what runs around its module."""
        attributes = vars(self.module)
        yield attributes["_parameters"], self.name
        yield attributes, "_hf_hook"
        yield attributes, "forward"
        if self._state is not None:
            yield vars(self._meta), "quant_state"

    def has_its_dtype(self) -> bool:
        """Whether nobody has cast the parameter since."""
        return self._meta.dtype is self._dtype

    @property
    def is_reusable(self) -> bool:
        """Whether the device parameter can be used for more than one forward."""
        # On a CPU, bitsandbytes may repack a 4-bit weight in its forward; it always takes an 8-bit one apart.
        return self._parameter is not None and self._parameter.device.type != "cpu" and not self._is_int8

    @property
    def _is_int8(self) -> bool:
        return type(self._meta).__name__ == "Int8Params"

    def swap(self) -> tuple[dict[str, Any], str, Any]:
        """Where the device parameter goes, and that parameter."""
        return self.module._parameters, self.name, self._parameter

    def onload_(self, views: list[Any]) -> None:
        """Give the module its device parameter."""
        if self._parameter is None:
            self._parameter = self.device_parameter(views)
        self.module._parameters[self.name] = self._parameter

    def offload_(self) -> None:
        """Give the module its meta parameter."""
        self.module._parameters[self.name] = self._meta
        if not self.is_reusable:
            if self._state is not None and self._parameter is not None:
                quant_states.note_dtype(self._parameter.quant_state)
            self._parameter = None
        if self._is_int8 and vars(self.module).get("state") is not None:
            reset_int8(self.module)

    def _own(self, tensors: list[Any]) -> list[Any]:
        return tensors[self._first : self._first + 1 + len(self._quantization)]

    def device_parameter(self, views: list[Any]) -> Any:
        """The parameter built from its own tensors among ``views``, those of the group."""
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


def reset_int8(layer: Any) -> None:
    """Give a ``Linear8bitLt`` a state without tensors. That of its forward belongs to that forward's autograd graph.

    The graph keeps the old state alive: the backward pass reads the weight and its scales from it.
    """
    layer.state = copy.copy(layer.state)
    layer.state.reset_grads()
    layer.state.idx = None
