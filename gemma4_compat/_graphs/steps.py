"""One step of a ``generate``: its inputs, and what it shares with other steps that the same graph serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._graphs import static_caches
from gemma4_compat._graphs.recaptures import Cause
from gemma4_compat._models import cache_names
from gemma4_compat._models.snapshots import changed

#: What the end of a kind says, in this order.
_SETTINGS = (
    "inference mode",
    "deterministic algorithms",
    "default dtype",
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "flash_sdp",
    "mem_efficient_sdp",
    "math_sdp",
    "cudnn_sdp",
)

#: Grows with the text, and only the prompt reads it (transformers 5.5; later releases leave it out themselves).
_OF_THE_PROMPT = ("mm_token_type_ids", "token_type_ids")


class Step:
    """A forward of one token for each row of a batch, with a static cache that has been filled.

    Attributes:
        inputs: of the model's forward, by name.
        cache: the cache among them.
        device: of what it reads, a ``torch.device``.
        tensors: the tensors in the inputs, in order.
        sliding: the sliding layers of the cache.
        addresses: of the cache's tensors.
        tokens: how many each row has.
        added: how many of them the cache holds afterwards.
        kind: hashable: steps of one kind run the same kernels on tensors of the same shapes.
        decodes: whether kernels of this package may compute it; PyTorch reads prompts.
        is_expected: whether there are a few kinds of such steps, so that a new kind is nothing to report.
        reads: the input with a row of tokens for each row of a batch.
    """

    decodes, is_expected, reads = True, False, "input_ids"

    def __init__(self, inputs: dict[str, Any], cache: Any, found: tuple[Any, ...]) -> None:
        self.inputs, self.cache = _with_own_positions(inputs), cache
        self.device = inputs[self.reads].device
        self.tensors = tensors(self.inputs)
        self.sliding = static_caches.sliding(cache)
        self.addresses = static_caches.addresses(found)
        self.tokens = self.added = int(inputs[self.reads].shape[1])
        self.kind = self._kind()

    @classmethod
    def of(cls, inputs: dict[str, Any]) -> Step | None:
        """The step with these inputs; None if it reads several tokens, or has another kind of cache."""
        cache, ids = cache_names.cache_in(inputs), inputs.get("input_ids")
        if cache is None or ids is None or ids.ndim != 2 or ids.shape[1] != 1 or not static_caches.is_static(cache):
            return None
        found = static_caches.tensors(cache)
        if found is None:
            return None
        return cls(without_token_types(inputs), cache, found)

    @property
    def obstacle(self) -> str | None:
        """Why this step cannot be captured, whatever the model."""
        import torch

        if torch.is_grad_enabled():
            return "gradients are enabled"
        if torch.is_autocast_enabled(self.device.type):
            return "autocast keeps casts of weights that a replay would not renew"
        if getattr(torch.nn.utils.parametrize, "_cache_enabled", 0):
            return "torch.nn.utils.parametrize.cached() keeps weights that a replay would not renew"
        if any(tensor.device != self.device for tensor in self.tensors):
            return "the inputs are on several devices"
        return None

    def _kind(self) -> tuple[Any, ...]:
        return (
            self._ways(),
            tuple([(tensor.shape, tensor.dtype, tensor.stride()) for tensor in self.tensors]),
            tuple(_names(self.inputs)),
            *settings(),
        )

    def forward(self, model: Any, inputs: dict[str, Any]) -> Any:
        """Run the model with these inputs, which may be those of a graph."""
        return model(**inputs)

    def changes(self) -> list[Any]:
        """The tensors of the cache that it may change, as views."""
        return static_caches.changed_by(self.cache, self.tokens)

    def _ways(self) -> tuple[Any, ...]:
        """What the update of each sliding layer depends on, which is not in a tensor."""
        return tuple(map(static_caches.is_full, self.sliding))

    def has_settings(self) -> bool:
        """Whether the settings of torch are still those of its kind."""
        return bool(self.kind[-len(_SETTINGS) :] == settings())

    def differences(self, kind: tuple[Any, ...], length: int) -> Iterator[tuple[Cause, str]]:
        """Why a graph does not serve this step: cause and detail.

        Args:
            kind: of the step that was captured.
            length: of its cache, in positions.
        """
        (full, shapes, names, *settings), (was_full, old_shapes, old_names, *old_settings) = self.kind, kind
        for name in dict.fromkeys((*_flat(old_names), *_flat(names))):
            if (name in _flat(old_names)) != (name in _flat(names)):
                yield Cause.OPTION, name
        own = static_caches.length(self.cache)
        found = [(name, *pair) for name, *pair in zip(_paths(self.inputs), old_shapes, shapes) if pair[0] != pair[1]]
        if own != length and "input_ids" not in [name for name, *_ in found]:
            yield Cause.CACHE_LENGTH, f"{changed(length, own)} positions"
        for name, old, new in found:
            yield Cause.SHAPE, f"{name}: {changed(_shown(old), _shown(new))}"
        for name, old, new in zip(_SETTINGS, old_settings, settings):
            if old != new:
                yield Cause.SETTING, f"{name}: {changed(old, new)}"
        if full != was_full:
            yield Cause.WINDOW, f"{changed(sum(was_full), sum(full))} of {len(full)} layers"

    def static_inputs(self) -> dict[str, Any]:
        """The inputs, with new tensors for a graph to read."""
        import torch

        with torch.inference_mode(False), torch.no_grad():
            return {name: value if value is self.cache else _own(value) for name, value in self.inputs.items()}


def _with_own_positions(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a chunk without a view of all positions, whose strides tell how long the text is."""
    import torch

    positions = inputs.get("position_ids")
    if positions is None or positions.ndim != 2 or positions.stride() == (positions.shape[1], 1):
        return inputs
    return inputs | {"position_ids": positions.clone(memory_format=torch.contiguous_format)}


def without_token_types(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs without what is read only to make masks, if the masks are made."""
    if not isinstance(inputs.get("attention_mask"), dict):
        return inputs
    return {name: None if name in _OF_THE_PROMPT else value for name, value in inputs.items()}


def settings() -> tuple[Any, ...]:
    """What kernels depend on in torch: the values of :data:`_SETTINGS`."""
    import torch

    return (
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    )


def tensors(value: Any) -> list[Any]:
    """The tensors in nested dictionaries, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors(part)]
    return []


def _names(inputs: dict[str, Any]) -> Iterator[Any]:
    """Names, and the values that are not tensors."""
    import torch

    for name, value in inputs.items():
        if isinstance(value, dict):
            yield name, tuple(_names(value)), "in it"
        elif isinstance(value, torch.Tensor) or name in cache_names.NAMES:
            yield name
        else:
            yield name, value if value.__hash__ is not None else id(value)


def _flat(names: tuple[Any, ...]) -> list[str]:
    """The names of a kind as text: ``attention_mask.sliding_attention``, ``output_hidden_states=True``."""
    found: list[str] = []
    for name in names:
        if isinstance(name, str):
            found.append(name)
        elif len(name) == 2:
            found.append(f"{name[0]}={name[1]!s:.60}")
        else:
            found += [f"{name[0]}.{part}" for part in _flat(name[1])]
    return found


def _paths(inputs: dict[str, Any], above: str = "") -> Iterator[str]:
    """The names of :func:`tensors`."""
    import torch

    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            yield f"{above}{name}"
        elif isinstance(value, dict):
            yield from _paths(value, f"{above}{name}.")


def _shown(tensor: tuple[Any, ...]) -> str:
    """A tensor, as a kind has it: shape, dtype, strides."""
    shape, dtype, _strides = tensor
    return f"{dtype} {list(shape)}"


def _own(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        own = torch.empty_like(value)
        own.copy_(value)
        return own
    if isinstance(value, dict):
        return type(value)((name, _own(part)) for name, part in value.items())
    return value


#: Stands for the cache in the output of a captured step.
_CACHE = object()


def kept(value: Any, cache: Any) -> Any:
    """The output of a captured step without its cache, which it must not keep alive."""
    return _CACHE if value is cache else _rebuilt(value, lambda part: kept(part, cache))


def given_back(value: Any, cache: Any) -> Any:
    """What :func:`kept` kept, with this cache in it."""
    return cache if value is _CACHE else _rebuilt(value, lambda part: given_back(part, cache))


def copied(value: Any, cache: Any) -> Any:
    """The kept output of a replayed step, with its own copies of the tensors and this step's cache."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.clone()
    return cache if value is _CACHE else _rebuilt(value, lambda part: copied(part, cache))


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        parts = {name: change(part) for name, part in value.items()}
        return parts if type(value) is dict else type(value)(**parts)  # a ModelOutput
    if isinstance(value, (tuple, list)):
        return type(value)([change(part) for part in value])
    return value
