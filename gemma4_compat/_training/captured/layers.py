"""The forward of a decoder layer: replayed, captured, or left to the layer."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._accelerate import module_hooks
from gemma4_compat._common import locks
from gemma4_compat._engine import settings
from gemma4_compat._graphs import obstacles
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._graphs.recording import RECORDERS, Recording
from gemma4_compat._models import capturing, checkpointing
from gemma4_compat._training import whole
from gemma4_compat._training.captured import calls, graphs

#: Tokens of a call, over all rows of a batch, unless more are asked for.
MAX_TOKENS = 2048
#: The call of a kind that is captured. Kinds that come once or twice, as in a dataset of texts of any length, are not.
CAPTURED_AT = 4
#: Kinds that are captured for one layer. No other one is captured then.
MAX_KINDS = 4
#: How often in turn a model may change before its graphs have served as many steps.
_MAX_IN_VAIN, _WORTH = 3, 10
_NAMES = ("Gemma4TextDecoderLayer", "Gemma4UnifiedTextDecoderLayer")
_log = logging.getLogger("gemma4_compat")


@dataclass
class Known:
    """What is known of a layer."""

    seen: dict[Any, int] = field(default_factory=dict)  # calls of each kind without a graph that serves them
    graphs: dict[Any, list[graphs.Graph]] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)
    obstacle: str | None = None


@dataclass
class TrainingStatistics:
    """How the decoder layers of a model ran in training steps, after ``train_fast``.

    Attributes:
        replayed: forwards of layers that were replayed.
        captured: layers that were captured, once for each kind of call.
        eager: forwards that ran without a graph.
        capture_seconds: time that captures took.
        reasons: why layers ran without a graph, other than before their kind of call was captured.
    """

    replayed: int = 0
    captured: int = 0
    eager: int = 0
    capture_seconds: float = 0.0
    reasons: tuple[str, ...] = ()


class Training:
    """The decoder layers of one model. A copy of the model has none, and trains without replays.

    Args:
        layers: all of them, in order.
        max_tokens: of a call that is captured, over all rows of a batch.
        recorders: by device type.
    """

    def __init__(
        self, layers: list[Any], max_tokens: float, recorders: Mapping[str, type[Recording]] = RECORDERS
    ) -> None:
        self.statistics = TrainingStatistics()
        self._max_tokens, self._recorders = max_tokens, recorders
        self._layers = [weakref.ref(layer) for layer in layers]
        self._places = {id(layer): index for index, layer in enumerate(layers)}
        self._known: list[Known] = [Known() for _ in layers]
        self._is_read = any(getattr(layer.self_attn, "is_kv_shared_layer", False) for layer in layers)
        self._memory: dict[Any, graphs.Memory] = {}
        self._guards: ModelGuards | None = None
        self._enabled: Any = None
        self._last, self._holds = len(layers), False
        self._served = self._in_vain = 0
        self._lock = locks.Lock(locks.TRAINING)

    def __deepcopy__(self, _memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def forward(self, layer: Any, below: Callable[..., Any], given: Any, named: dict[str, Any]) -> Any:
        """Run a layer."""
        call = self._call(layer, given, named)
        if call is None:
            return below(*given, **named)
        run = functools.partial(call.form.call, layer, below)
        with self._lock.held():
            place = self._places[id(layer)]
            graph = self._graph(place, layer, call, run)
            known = self._known[place]
            weights, guards = known.weights, self._guards
        if graph is None or guards is None:
            self.statistics.eager += 1
            return below(*given, **named)
        self.statistics.replayed += 1
        self._served += 1
        may_replay = guards.check_weights
        outputs = graphs.Replay(graph, run, call.tensors, weights, may_replay, layer, self.reason).outputs()
        found, handed_on, cached = calls.with_tensors(graph.form, iter(outputs))
        if call.shared is not None:
            call.shared.update(handed_on)
        if call.cache is not None:
            call.cache.update(*cached, layer.self_attn.layer_idx)
        return found

    def _call(self, layer: Any, given: Any, named: dict[str, Any]) -> calls.Call | None:
        """A call that may be replayed; None if it is no training step, too long, or something is in the way of it."""
        import torch

        if not (layer.training and torch.is_grad_enabled()) or torch.compiler.is_compiling() or whole.is_traced():
            return None
        try:
            call = calls.Call(layer, given, named)
        except calls.UnknownArgumentError as error:
            self._left(str(error))
            return None
        if not call.tensors or call.tensors[0].shape[:-1].numel() > self._max_tokens:
            return None
        if not any(one.requires_grad for one in (*call.tensors, *layer.parameters())):
            return None
        for reason in _of_a_call(layer, call, named, self._recorders):
            self._left(reason)
            return None
        return call

    def _left(self, reason: str) -> None:
        """A layer runs without a graph for this reason."""
        self.statistics.eager += 1
        self.reason(reason)

    def _graph(self, place: int, layer: Any, call: calls.Call, run: graphs.Run) -> graphs.Graph | None:
        """The graph that serves a call, captured if it is time for that; otherwise None."""
        if place <= self._last:
            self._begin()
        self._last = place
        known = self._known[place]
        if not self._holds or known.obstacle is not None:
            return None
        kind = call.kind, _stream(call.tensors[0].device)
        made = known.graphs.get(kind, [])
        for graph in made:
            if all(look.finds_the_same(call.tensors) for look in graph.looks):
                return graph
        known.seen[kind] = known.seen.get(kind, 0) + 1
        if known.seen[kind] < CAPTURED_AT:
            return None
        if sum(map(len, known.graphs.values())) >= MAX_KINDS:
            what = "layouts of masks" if made else "shapes of batches"
            self.reason(f"{MAX_KINDS} {what} are captured; pad to a few lengths (pad_to_multiple_of)")
            return None
        return self._captured(known, kind, layer, call, run)

    def _captured(
        self, known: Known, kind: tuple[Any, Any], layer: Any, call: calls.Call, run: graphs.Run
    ) -> graphs.Graph | None:
        began = time.perf_counter()
        if kind[1] not in self._memory:
            device = call.tensors[0].device
            self._memory[kind[1]] = graphs.Memory(device, self._recorders[device.type])
        memory = self._memory[kind[1]]
        role = getattr(layer.self_attn, "is_sliding", None)
        try:
            made = graphs.Graph(run, call.tensors, known.weights, memory, role, is_read=self._is_read)
        except Exception as error:  # noqa: BLE001  (whatever is in the way: the layer runs as it did before)
            first, *_ = str(error).split("\n")
            known.obstacle = f"a layer cannot be captured: {type(error).__name__}: {first}"
            self.reason(known.obstacle)
            return None
        known.graphs.setdefault(kind, []).append(made)
        del known.seen[kind]
        self.statistics.captured += 1
        self.statistics.capture_seconds += time.perf_counter() - began
        return made

    def _begin(self) -> None:
        """A step begins: look whether the layers are what they were."""
        enabled = settings.enabled()[0]  # kernels depend on it
        held = self._guards is not None and self._guards.check_step() and self._guards.check_all()
        if not held or enabled != self._enabled:
            self._enabled = enabled
            self._renew()
        self._holds = self._guards is not None

    def _renew(self) -> None:
        """Release every graph, and look at the layers as they are now."""
        if any(known.graphs for known in self._known):
            self._in_vain = 0 if self._served >= _WORTH * len(self._layers) else self._in_vain + 1
        self._served = 0
        self._known, self._memory, self._guards = [Known() for _ in self._layers], {}, None
        if self._in_vain >= _MAX_IN_VAIN:
            self.reason(f"the model changes every few steps, {_MAX_IN_VAIN} times in turn")
            return
        modules = self._look()
        if not modules:
            return
        self._guards = ModelGuards(modules, self._forget, trained=True)

    def _look(self) -> list[Any]:
        """Look at the layers: their trained weights, and obstacles. Returns the modules of those without one."""
        layers = [layer for layer in (reference() for reference in self._layers) if layer is not None]
        parts = [list(layer.modules()) for layer in layers]
        for layer, modules, known in zip(layers, parts, self._known):
            known.weights = [weight for weight in layer.parameters() if weight.requires_grad]
            known.obstacle = next(_of_a_layer(layer, modules), None)
            if known.obstacle is not None:
                self.reason(known.obstacle)
        replayable = [part for part, known in zip(parts, self._known) if known.obstacle is None]
        return list(dict.fromkeys(module for part in replayable for module in part))

    def _forget(self, guards: ModelGuards, _name: str) -> None:
        """A layer is gone."""
        if guards is self._guards:
            self._known, self._memory, self._guards = [Known() for _ in self._layers], {}, None

    def clear(self) -> None:
        """Release every graph, and their memory."""
        with self._lock.held():
            self._known, self._memory, self._guards = [Known() for _ in self._layers], {}, None
            self._last, self._served, self._in_vain = len(self._layers), 0, 0

    def reason(self, text: str) -> None:
        """Keep why layers run without a graph, and log it once."""
        if text not in self.statistics.reasons:
            self.statistics.reasons += (text,)
            _log.warning("train_fast: decoder layers run without a graph: %s.", text)


def decoder_layers(model: Any) -> list[Any]:
    """Those of a Gemma 4 text model, in order."""
    modules = () if isinstance(model, type) or not hasattr(model, "modules") else model.modules()
    return [module for module in modules if type(module).__name__ in _NAMES]


def _of_a_layer(layer: Any, modules: list[Any]) -> Iterator[str]:
    """Why a layer cannot be replayed: its Python has to run in each step."""
    sharded = whole.obstacle(layer)
    if sharded:
        yield sharded
    for module in modules:
        hook = module_hooks.offload_hook(module)
        if hook is not None and any(weight is not None for weight in module._parameters.values()):
            yield "their weights are offloaded"
    if any(map(obstacles.is_8_bit, modules)):
        yield "8-bit layers of bitsandbytes synchronize with the host"
    yield from obstacles.of_hooks(layer, [], backward=True)  # those on every module
    for module in modules:
        name = type(module).__name__
        if obstacles.only_in_training(module, decodes=False):
            yield f"{name} draws random numbers, as for dropout, or may do something else in training mode only"
        if module is layer:
            continue  # its own hooks run around a replay
        if any(obstacles.users_hooks(module)) or module._backward_hooks or module._backward_pre_hooks:
            yield f"a hook on {name} has to run in every step"
        if obstacles.has_own_forward(module):
            yield f"{name} has a forward of its own"


def _of_a_call(
    layer: Any, call: calls.Call, named: dict[str, Any], recorders: Mapping[str, type[Recording]]
) -> Iterator[str]:
    """Why this call of a layer cannot be replayed."""
    import torch

    device = call.tensors[0].device
    if device.type not in recorders:
        yield f"they compute on {device}, and graphs need CUDA"
    if any(one.device != device for one in call.tensors):
        yield "their inputs are on several devices"
    if torch.is_anomaly_enabled():
        yield "torch.autograd.detect_anomaly is on"
    if named.get("output_attentions") or _collects():
        yield "attention weights or router logits are asked for"
    if getattr(layer, checkpointing.FLAG, False):
        if not checkpointing.is_in_forward():
            yield "checkpointing is on, and needs transformers 5.23; a replay takes as little memory without it"
        if not _checkpoints_plainly(layer):
            yield "what checkpointing keeps is offloaded, or chosen by a function"
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


def _stream(device: Any) -> Any:
    import torch

    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
