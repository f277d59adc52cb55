"""A module that computes each token by itself, such as an MLP, applied to a few tokens at a time.

The gate, the product and the rest of an MLP of 16,384 tokens and a width of 12,288 are 384 MiB each in bfloat16, and
autograd keeps five of them. Here only the inputs are kept. The backward pass computes one chunk again, takes its
gradients, and goes to the next one. So only what one chunk needs exists at once, at the price of one more forward.

Per token the arithmetic is upstream's, by upstream's own code. The gradient of a weight is a sum over chunks, in
float32, rounded once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.io import notice
from gemma4_compat._offload import torch_internals
from gemma4_compat._training import modules

if TYPE_CHECKING:
    import torch


def apply(
    function: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    *,
    tokens: int,
    trained: tuple[torch.Tensor, ...] = (),
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    draws: bool = True,
    module: Any = None,
) -> torch.Tensor:
    """``function(inputs)``, a chunk at a time. A backward pass with ``create_graph=True`` computes it as a whole.

    Args:
        function: (1, n, features) -> (1, n, other features), of any floating dtype, each token by itself.
        inputs: (..., features).
        tokens: of a chunk, at most; at least 1. Chunks are equally long, give or take one.
        trained: the weights that get a gradient. No other gradient leaves ``function``.
        around: entered once for all chunks of the forward, and once for those of the backward pass.
        draws: False if ``function`` draws no random numbers and autocast changes nothing in it.
        module: has the weights in ``trained``.

    Returns:
        (..., other features), of the dtype and on the device of what ``function`` returns.
    """
    found: torch.Tensor = _function().apply(inputs, function, tokens, around, draws, module, *trained)
    return found


@functools.cache
def _function() -> Any:
    import torch

    class InChunks(torch.autograd.Function):  # type: ignore[misc] # torch is not typed here
        """Keeps the inputs, and the state of the random numbers and of autocast for what is computed again."""

        @staticmethod
        def forward(
            ctx: Any, inputs: Any, function: Any, tokens: int, around: Any, draws: bool, module: Any, *trained: Any
        ) -> Any:
            ctx.save_for_backward(inputs)
            ctx.function, ctx.tokens, ctx.around, ctx.trained, ctx.module = function, tokens, around, trained, module
            ctx.again = _Again(inputs) if draws else contextlib.nullcontext
            outputs = None
            with around(), _graph_of_its_own():
                for part, rows in _parts(inputs, tokens, ctx.needs_input_grad[0]):
                    found = function(rows[None])[0].detach()
                    if outputs is None:
                        outputs = found.new_empty(*inputs.shape[:-1], found.shape[-1])
                    outputs.view(-1, found.shape[-1])[part] = found
                    del found
            return outputs

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if torch.is_grad_enabled():
                of_inputs, *others = _recorded(ctx, gradient)
                return (of_inputs, None, None, None, None, None, *others)
            (inputs,) = ctx.saved_tensors
            first = (
                torch.empty_like(inputs, memory_format=torch.contiguous_format) if ctx.needs_input_grad[0] else None
            )
            wanted = [weight for weight, needed in zip(ctx.trained, ctx.needs_input_grad[6:]) if needed]
            sums: list[Any] = [None] * len(wanted)
            gradient = gradient.reshape(-1, gradient.shape[-1])
            with ctx.again(), ctx.around(), _graph_of_its_own():
                for part, rows in _parts(inputs, ctx.tokens, first is not None):
                    asked = ([] if first is None else [rows]) + wanted
                    outputs = ctx.function(rows[None])
                    found = list(torch.autograd.grad(outputs, asked, gradient[part][None], allow_unused=True))
                    del outputs
                    if first is not None:
                        more = found.pop(0)
                        first.view(-1, first.shape[-1])[part] = 0 if more is None else more
                        del more
                    for index, more in enumerate(found):
                        if more is not None:
                            sums[index] = _wide(more) if sums[index] is None else sums[index].add_(more)
            given = iter(
                None if total is None else total.to(weight.dtype) for total, weight in zip(sums, wanted, strict=True)
            )
            of_trained = (next(given) if needed else None for needed in ctx.needs_input_grad[6:])
            return (first, None, None, None, None, None, *of_trained)

    return InChunks


def _recorded(ctx: Any, gradient: Any) -> list[Any]:
    """The gradients of the inputs and of each trained weight, to be differentiated in turn. They need all tokens."""
    import torch

    _tell()
    (inputs,) = ctx.saved_tensors
    with ctx.again(), ctx.around(), modules.as_views(ctx.module, ctx.trained) as views:
        given = inputs.view_as(inputs)
        outputs = ctx.function(given.reshape(1, -1, given.shape[-1])).view(gradient.shape)
        needed = [ctx.needs_input_grad[0], *ctx.needs_input_grad[6:]]
        asked = [one for one, wanted in zip((given, *views), needed) if wanted]
        found = iter(torch.autograd.grad(outputs, asked, gradient, allow_unused=True, create_graph=True))
    return [next(found) if wanted else None for wanted in needed]


@functools.cache
def _tell() -> None:
    notice.warn_user(
        "create_graph=True asks for gradients of gradients: MLPs in chunks are computed again as a whole, and take "
        "the memory of all tokens. Call train_fast(model, mlp=False) if this is intended."
    )


def _wide(gradient: Any) -> Any:
    """The gradient in at least float32, to add to; nobody else has it."""
    import torch

    return gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)


def _parts(inputs: Any, tokens: int, wanted: bool) -> Iterator[tuple[slice, Any]]:
    """Where each chunk is among the tokens, and its inputs, (n, features), a leaf that has a gradient if ``wanted``.

    So it is in the forward: without a gradient bitsandbytes runs other kernels, which differ bitwise.
    """
    rows = inputs.detach().reshape(-1, inputs.shape[-1])
    count = -(-len(rows) // tokens)
    for index in range(min(count, 2) if torch_internals.is_fake(inputs) else count):  # the others take no more memory
        part = slice(index * len(rows) // count, (index + 1) * len(rows) // count)
        yield part, rows[part].requires_grad_(wanted)


@contextlib.contextmanager
def _graph_of_its_own() -> Iterator[None]:
    """Inside, a graph is recorded. What it keeps goes to nobody's hooks: not to the host, not to a checkpoint."""
    import torch

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.detach(), lambda kept: kept):
        yield


class _Again:
    """Random numbers and autocast as they are now, for computing the same again: a context manager, when called."""

    def __init__(self, inputs: Any) -> None:
        import torch
        from torch.utils import checkpoint

        kinds = [kind for kind in {"cpu", inputs.device.type} if torch.amp.is_autocast_available(kind)]
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in sorted(kinds)
        ]
        self._fake = torch_internals.is_fake(inputs)
        if not self._fake:
            self._kind = inputs.device.type
            self._random = torch.get_rng_state()
            self._devices, self._states = checkpoint.get_device_states(inputs)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        import torch
        from torch.utils import checkpoint

        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                # Without its cache: a cast weight would be in the graph of the chunk that it was cast for.
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            if not self._fake:
                kind = self._kind if self._devices else "cuda"  # without devices it only names a module of torch
                stack.enter_context(torch.random.fork_rng(devices=self._devices, device_type=kind))
                torch.set_rng_state(self._random)
                if self._devices:
                    checkpoint.set_device_states(self._devices, self._states, device_type=kind)
            yield
