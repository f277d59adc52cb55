"""The forward of a decoder layer: replayed, captured, or left to the layer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gemma4_compat._engine import settings
from gemma4_compat._engine.runtime import locks
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._gemma4.state import capturing, checkpointing
from gemma4_compat._graphs import unsupported
from gemma4_compat._graphs.captured_calls import CapturedCalls, Pool, State
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._graphs.recording import RECORDERS, Recording
from gemma4_compat._graphs.statistics import TrainingStatistics
from gemma4_compat._offload.transfer import streaming
from gemma4_compat._training import modules
from gemma4_compat._training.captured import calls, fusing, graphs
from gemma4_compat._training.captured.calls import LayerCall

#: Tokens of a call, over all rows of a batch, unless more are asked for.
MAX_TOKENS = 2048
#: The call of a kind that is captured. Kinds that come once or twice, as in a dataset of texts of any length, are not.
CAPTURED_AT = 4
#: How often in turn a model may change before its graphs have served as many steps.
_MAX_IN_VAIN, _WORTH = 3, 10
_NAMES = ("Gemma4TextDecoderLayer", "Gemma4UnifiedTextDecoderLayer")
_log = logging.getLogger("gemma4_compat")


class Training:
    """The decoder layers of one model. A copy of the model has none, and trains without replays.

    Args:
        layers: all of them, in order.
        max_tokens: of a call that is captured, over all rows of a batch.
        recorders: by device type.
        capture_at: the call of a signature that is captured.

    Attributes:
        states: the layers as they were in the last step that was looked at; nothing if nothing is captured.
        weights: those of each layer that are trained.
        is_read: whether layers read what others hand on.
    """

    def __init__(
        self,
        layers: list[Any],
        max_tokens: float,
        recorders: Mapping[str, type[Recording]] = RECORDERS,
        capture_at: int = CAPTURED_AT,
    ) -> None:
        self.statistics = TrainingStatistics()
        self.fusing = fusing.Fusing(self.statistics)
        self.states: list[State] = []
        self.weights: list[list[Any]] = []
        self.is_read = any(getattr(layer.self_attn, "is_kv_shared_layer", False) for layer in layers)
        self._max_tokens, self._recorders = max_tokens, recorders
        self._layers = [weakref.ref(layer) for layer in layers]
        self._places = {id(layer): index for index, layer in enumerate(layers)}
        self._memory: dict[Any, graphs.Memory] = {}  # by stream
        self._groups: dict[int, Any] = {}  # weights of streamed layers, by place, as they were then
        options: dict[str, Any] = {"capture_at": capture_at, "limit": calls.MAX_KINDS, "pool": Pool(recorders)}
        self._calls = [CapturedCalls(self, statistics=self.statistics, **options) for _ in layers]
        self._enabled: Any = None
        self._last = len(layers)
        self._served = self._in_vain = 0
        self._lock = locks.Lock(locks.TRAINING)

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def forward(self, layer: Any, below: Callable[..., Any], given: Any, named: dict[str, Any]) -> Any:
        """Run a layer."""
        call = self._call(layer, below, given, named)
        if call is not None:
            with self._lock.held():
                outputs = self._replayed(call)
            if outputs is not None:
                return outputs
            self.statistics.eager += 1
        return below(*given, **named)

    def _call(self, layer: Any, below: Callable[..., Any], given: Any, named: dict[str, Any]) -> LayerCall | None:
        """A call that may be replayed; None if it is no training step, too long, or something is in the way of it."""
        if not modules.trains(layer):
            return None
        try:
            call = LayerCall(self, self._places[id(layer)], layer, below, given, named)
        except graphs.UnknownArgumentError as error:
            self._left(str(error))
            return None
        if not call.tensors or call.tensors[0].shape[:-1].numel() > self._max_tokens:
            return None
        if not any(one.requires_grad for one in (*call.tensors, *layer.parameters())):
            return None
        for reason in _call_reasons(layer, call, named, self._recorders):
            self._left(reason)
            return None
        return call

    def _left(self, reason: str) -> None:
        """A layer runs without a graph for this reason."""
        self.statistics.eager += 1
        self.reason(reason)

    def _replayed(self, call: LayerCall) -> Any:
        """What a replay returns, captured before if it is time for that; None if the call has to run eagerly."""
        same = call.group is self._groups.get(call.place)
        if call.place <= self._last or not same:
            self._begin(same)
        self._last, layer = call.place, self._calls[call.place]
        found = layer.run(call)
        if found is None:
            layer.has_run(call)
        else:
            self._served += 1
        return found

    def check(
        self, call: Any, *, first: bool = False, settling: bool = False, no_user_code: bool | None = None
    ) -> State | None:
        """The layers as they were when the step began: they are looked at then."""
        return next(iter(self.states), None)

    def rest_holds(self, call: Any) -> bool:
        """Nothing begins before that look."""
        return False

    def _begin(self, same: bool) -> None:
        """A step begins, or the weights that are streamed are not the ``same``: look whether layers have changed."""
        enabled = settings.enabled()[0]  # kernels depend on it
        held = same and any(state.guards.check_step() and state.guards.check_all() for state in self.states)
        if not held or enabled != self._enabled:
            self._enabled = enabled
            self._renew()

    def _renew(self) -> None:
        """Release every graph, and look at the layers as they are now."""
        if any(any(one.graphs()) for one in self._calls):
            self._in_vain = 0 if self._served >= _WORTH * len(self._layers) else self._in_vain + 1
        self._served = 0
        self._release()
        if self._in_vain >= _MAX_IN_VAIN:
            self.reason(f"the model changes every few steps, {_MAX_IN_VAIN} times in turn")
            return
        replayable = self._look()
        if replayable:
            swapped = [place for group in self._groups.values() for place in group.swapped()]
            self.states[0].guards = ModelGuards(replayable, self._forget, swapped=swapped, trained=True)
        else:
            self.states = []

    def _look(self) -> list[Any]:
        """Look at the layers: their trained weights, and why some are not replayed. Returns the modules of others."""
        layers = [layer for layer in (reference() for reference in self._layers) if layer is not None]
        trained = [modules.trained(layer) for layer in layers]
        self.weights = [[one for one in weights if one.device.type != "meta"] for weights in trained]
        state = State(None)
        replayable: dict[Any, None] = {}
        for place, (layer, layer_calls) in enumerate(zip(layers, self._calls)):
            inside, group = list(layer.modules()), streaming.group_of(layer)
            if group is not None:
                self._groups[place] = group
            reason = next(_layer_reasons(layer, inside, () if group is None else group.modules()), None)
            windows.replay(layer.self_attn, self._max_tokens if reason is None else 0)
            if reason is None:
                replayable |= dict.fromkeys(inside)
            else:
                state.calls[layer_calls].refused.add(LayerCall.refused_as)
                self.reason(reason)
        self.states = [state]
        return list(replayable)

    def _forget(self, guards: ModelGuards, _name: str) -> None:
        """A layer is gone."""
        if any(state.guards is guards for state in self.states):
            self._release()

    def _release(self) -> None:
        self.states, self.weights, self._memory, self._groups = [], [], {}, {}

    def memory(self, call: LayerCall) -> graphs.Memory:
        """What graphs of a call's stream share."""
        stream, device = call.signature[-1], call.device
        if stream not in self._memory:
            self._memory[stream] = graphs.Memory(device, self._recorders[device.type])
        return self._memory[stream]

    def clear(self) -> None:
        """Release every graph, and their memory."""
        with self._lock.held():
            self._release()
            self._last, self._served, self._in_vain = len(self._layers), 0, 0

    def reason(self, text: str) -> None:
        """Keep why layers run without a graph, and log it once."""
        if self.statistics.add_reason(text):
            _log.warning("train_fast: decoder layers run without a graph: %s.", text)


def decoder_layers(model: Any) -> list[Any]:
    """Those of a Gemma 4 text model, in order."""
    found = () if isinstance(model, type) or not hasattr(model, "modules") else model.modules()
    return [module for module in found if type(module).__name__ in _NAMES]


def _layer_reasons(layer: Any, inside: list[Any], streamed: Sequence[Any]) -> Iterator[str]:
    """Why a layer cannot be replayed: its Python has to run in each step."""
    sharded = modules.unsupported_reason(layer)
    if sharded:
        yield sharded
    for module in inside:
        hook = None if module in streamed else module_hooks.offload_hook(module)
        if hook is not None and any(weight is not None for weight in module._parameters.values()):
            yield "their weights are offloaded, and not streamed"
    if any(map(unsupported.is_8_bit, inside)):
        yield "8-bit layers of bitsandbytes synchronize with the host"
    yield from unsupported.hook_reasons(layer, [], backward=True)  # those on every module
    for module in inside:
        name = type(module).__name__
        if unsupported.only_in_training(module, decodes=False):
            yield f"{name} draws random numbers, as for dropout, or may do something else in training mode only"
        if module is layer:
            continue  # its own hooks run around a replay
        if any(unsupported.users_hooks(module)) or module._backward_hooks or module._backward_pre_hooks:
            yield f"a hook on {name} has to run in every step"
        if unsupported.has_own_forward(module):
            yield f"{name} has a forward of its own"


def _call_reasons(
    layer: Any, call: LayerCall, named: dict[str, Any], recorders: Mapping[str, type[Recording]]
) -> Iterator[str]:
    """Why this call of a layer cannot be replayed."""
    import torch

    device = call.device
    if device.type not in recorders:
        yield f"the layers are on {device}, and graphs need CUDA"
    if any(one.device != device for one in call.tensors):
        yield "their inputs are on several devices"
    if call.group is not None and not call.group.onloaded:
        yield "the forward of a streamed layer is called without the hooks that bring its weights"
    if torch.is_anomaly_enabled():
        yield "torch.autograd.detect_anomaly is on"
    if named.get("output_attentions") or _collects():
        yield "attention weights or router logits are asked for"
    if getattr(layer, checkpointing.FLAG, False):
        if not checkpointing.is_in_forward():
            yield "checkpointing is on, and needs transformers 5.23; a replay takes as little memory without it"
        if not _checkpoints_plainly(layer):
            yield "activation offloading or selective checkpointing is on"
    if not checkpointing.can_see_hooks():
        yield "this torch does not say whether hooks on saved tensors are active"
    if checkpointing.saved_tensors_hooks() is not None:
        yield "hooks on saved tensors are active: something offloads activations, or checkpoints more than a layer"


def _collects() -> bool:
    """Whether transformers collects what parts of a layer return."""
    return any(name != "hidden_states" and not name.startswith("_") for name in capturing.collected())


def _checkpoints_plainly(layer: Any) -> bool:
    """Whether checkpointing keeps the layer's inputs where they are, and nothing else."""
    import torch.utils.checkpoint

    function = getattr(layer, "_gradient_checkpointing_func", None)
    options = getattr(function, "keywords", {})
    plain = getattr(function, "func", function) is torch.utils.checkpoint.checkpoint
    return plain and "context_fn" not in options
