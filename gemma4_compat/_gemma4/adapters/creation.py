"""Create the LoRA layers of an adapter that is being loaded, without initial weights that the load would overwrite.

PEFT draws random weights for each layer, three times as many numbers as it keeps, and then overwrites them with the
adapter's file. Inside :func:`creating`, layers that the file has weights for get uninitialized memory, and the numbers
are only counted. At the end torch's generator is advanced by that count, so later draws are the same as upstream's. A
weight that was not read after all gets the values it would have had: :meth:`Creation.fill`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.adapters import mersenne

#: PEFT's LoRA layers that are all created the same way and have only the parameters of their containers.
PLAIN = ("Linear", "Linear4bit", "Linear8bitLt")
#: Fields of a LoRA config that make the layers ordinary ones, whose weights nothing reads before they are loaded.
_ORDINARY: dict[str, Any] = {"init_lora_weights": True, "use_dora": False, "lora_bias": False}
_VARIANTS = ("use_dora", "use_qalora", "alora_invocation_tokens", "arrow_config")


@dataclass
class Creation:
    """The layers of one adapter.

    Attributes:
        adapter: its name in the model.
        names: modules for which the file has both weights -> rank, inputs and outputs.
        current: the module that is getting its layer; None if the file has no weights for it.
        config: of the adapter.
        made: layers of modules in ``names`` whose weights were created without values.
        is_read: whether the file was read; from then on weights have values.
    """

    adapter: str
    names: Mapping[str, tuple[int, ...]]
    current: str | None = None
    config: Any = None
    is_read: bool = False
    made: dict[str, Any] = field(default_factory=dict)
    _usual: dict[type, bool] = field(default_factory=dict)
    _count: int = 0
    _drawn: list[tuple[Any, list[Any]]] = field(default_factory=list)
    _pending: list[Any] = field(default_factory=list)

    def is_ordinary(self, layer: Any, adapter: str, rank: Any, more: dict[str, Any]) -> bool:
        """Whether the file has the layer's weights and nothing uses them before they are read."""
        kind, config = type(layer), self.config
        if (
            self.current is None
            or self.current not in self.names
            or adapter != self.adapter
            or more.get("tied_adapter")
        ):
            return False
        if not kind.__module__.startswith("peft.tuners.lora.") or kind.__name__ not in PLAIN:
            return False
        if self.names[self.current] != (rank, layer.in_features, layer.out_features) or 0 in self.names[self.current]:
            return False
        if kind not in self._usual:
            values = all(getattr(config, name) is value for name, value in _ORDINARY.items())
            self._usual[kind] = values and not _has_variant(layer, config)
        others = [layer.lora_dropout, layer.lora_A, layer.lora_B]
        return self._usual[kind] and not any(
            adapter in there or any(value.device.type == "meta" for value in there.parameters()) for there in others
        )

    def linear(self, inputs: int, outputs: int, device: Any, dtype: Any, *, trained: bool = True) -> Any:
        """An ``nn.Linear`` without a bias and with an uninitialized weight."""
        import torch

        made = torch.nn.Linear.__new__(torch.nn.Linear)
        torch.nn.Module.__init__(made)
        made.in_features, made.out_features = inputs, outputs
        vars(made)["_parameters"]["weight"] = torch.nn.Parameter(
            torch.empty((outputs, inputs), device=device, dtype=dtype), requires_grad=trained
        )
        vars(made)["_parameters"]["bias"] = None
        return made

    def count(self, first: Any, second: Any) -> None:
        """Count the numbers that upstream would have drawn for both weights of a layer."""
        if not self._pending:
            import torch

            self._drawn.append((torch.get_rng_state(), self._pending))
        self._pending.append((first, second))
        # `nn.Linear` draws both; PEFT then draws the first again.
        self._count += 2 * first.weight.numel() + second.weight.numel()

    def settle(self) -> None:
        """Advance torch's generator by what was counted, before anything else draws from it."""
        if self._count:
            mersenne.advance(self._count)
        self._count, self._pending = 0, []

    def fill(self, missing: Collection[int]) -> None:
        """Give weights that were not read the values they would have had; ``missing`` are the ``id`` of their
        layers.
        """
        import torch

        now = torch.get_rng_state()
        try:
            for state, layers in self._drawn:
                torch.set_rng_state(state)
                for first, second in layers:
                    drawn = torch.empty(first.weight.shape, dtype=torch.float32, device="cpu")
                    torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
                    torch.empty(second.weight.shape, dtype=torch.float32, device="cpu").uniform_()
                    torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
                    if id(first) in missing:
                        first.weight.data.copy_(drawn)
                    if id(second) in missing:
                        second.weight.data.zero_()
        finally:
            torch.set_rng_state(now)

    def zero(self, modules: Iterable[Any]) -> None:
        """Zero the modules that have no values yet, for code that runs a layer before the file is read."""
        mine = set() if self.is_read else {id(module) for module in self.layers}
        for module in modules:
            if id(module) in mine:
                module.weight.data.zero_()

    @property
    def layers(self) -> Iterator[Any]:
        """The ``nn.Linear`` modules that have no values yet."""
        for _, pairs in self._drawn:
            for pair in pairs:
                yield from pair


def _has_variant(layer: Any, config: Any) -> bool:
    """Whether PEFT has a variant for this kind of layer and this config (DoRA, aLoRA, Arrow, ...)."""
    if "config" in inspect.signature(layer.resolve_lora_variant).parameters:
        return layer.resolve_lora_variant(config=config) is not None
    return any(getattr(config, name, None) for name in _VARIANTS)  # PEFT 0.18


_creating: ContextVar[Creation | None] = ContextVar("_creating", default=None)


@contextlib.contextmanager
def creating(adapter: str, names: Mapping[str, tuple[int, ...]]) -> Iterator[Creation]:
    """Inside, the adapter's layers for these modules are created without values, unless torch is not as usual."""
    creation = Creation(adapter, names if is_usual() else {})
    try:
        with in_place.bound(_creating, creation):
            yield creation
    finally:
        creation.settle()


def being_created() -> Creation | None:
    """The creation of the innermost :func:`creating`."""
    return _creating.get()


def is_usual() -> bool:
    """Whether torch creates parameters the normal way and draws them from its CPU generator.

    Not under ``torch.device("meta")``, accelerate's ``init_empty_weights``, DeepSpeed's ``zero.Init``, hooks on the
    registration of parameters, another default dtype, or with several processes (PEFT synchronizes their weights).
    """
    import torch
    from torch.nn.modules import module as registry

    functions = (
        torch.nn.Module.__init__,
        torch.nn.Module.register_parameter,
        torch.nn.Linear.__init__,
        torch.nn.Linear.reset_parameters,
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.zeros_,
    )
    places = [getattr(getattr(function, "__code__", None), "co_filename", "") for function in functions]
    hooks = (registry._global_parameter_registration_hooks, registry._global_module_registration_hooks)
    return (
        all(place.replace("\\", "/").rpartition("/torch/")[1] for place in places)
        and not any(hooks)
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and torch.get_default_dtype() == torch.float32
        and torch.get_default_device().type == "cpu"
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    )
