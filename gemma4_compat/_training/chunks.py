"""Cross entropy of the logits of a language model's head, a few tokens at a time.

The logits of 2,048 tokens over 262,144 words are 1 GiB in bfloat16, and autograd keeps more than three times as much.
Here the head runs on a few tokens, their logits are overwritten with their gradient, and the head's own backward pass
follows at once. Only two things are kept for the backward pass of the model: the gradient of the hidden states, which
is as large as they are, and, if they are trained, that of the head's weights. The head runs once; nothing is
recomputed.

Per token the arithmetic is upstream's, operation by operation and dtype by dtype: the soft cap in the dtype of the
logits, log-softmax in float32, the gradient rounded where autograd rounds it. Two things differ, both by rounding: the
division by the number of tokens comes last, and gradients of the head's weights are sums over chunks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.specs import cross_entropy as spec
from gemma4_compat._offload import torch_internals

if TYPE_CHECKING:
    import torch

#: Bytes of the logits that a head computes at once.
LOGITS_BYTES = 96 * 2**20
#: Bytes of a block of them in float32. PyTorch's operations for the loss briefly need about four times as much.
BLOCK_BYTES = 2**24
#: A head of more than one linear layer, such as an adapted one, briefly holds this many copies of its output.
_COPIES = 3
_inside = threading.local()


@contextlib.contextmanager
def planned() -> Iterator[None]:
    """Inside, this thread computes tensors without memory: the first three chunks and the last one."""
    _inside.planned = True
    try:
        yield
    finally:
        _inside.planned = False


def cross_entropy(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    soft_cap: float | None = None,
    trained: tuple[torch.Tensor, ...] = (),
    plain: bool = True,
) -> torch.Tensor:
    """The sum of the cross entropies of ``head(hidden_states)``; differentiable once.

    Args:
        head: hidden states, (1, n, hidden) -> logits, (1, n, vocabulary), of any floating dtype.
        hidden_states: (tokens, hidden).
        targets: (tokens,), int64: the next words, without ignored ones.
        vocabulary: number of words.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``; None for no cap.
        trained: the weights of the head that get a gradient.
        plain: whether the head is one linear layer.

    Returns:
        A float32 scalar on the device of the logits.

    Raises:
        Gemma4CompatError: in a backward pass with ``create_graph=True``.
    """
    import torch

    if not torch.is_grad_enabled():  # a Function does not see this
        hidden_states, trained = hidden_states.detach(), ()
    rows = max(1, LOGITS_BYTES // (vocabulary * hidden_states.element_size()))
    rows = max(1, rows // (1 if plain else _COPIES))
    total: torch.Tensor = _function().apply(hidden_states, targets, head, soft_cap, rows, *trained)
    return total


@functools.cache
def _function() -> Any:
    import torch

    class ChunkedCrossEntropy(torch.autograd.Function):  # type: ignore[misc] # torch is not typed here
        """Gradients are computed with the loss; the backward pass only scales them."""

        @staticmethod
        def forward(ctx: Any, hidden: Any, targets: Any, head: Any, soft_cap: Any, rows: int, *trained: Any) -> Any:
            wanted = [index for index, weight in enumerate(trained) if ctx.needs_input_grad[5 + index]]
            gradients = _Gradients(hidden if ctx.needs_input_grad[0] else None, [trained[index] for index in wanted])
            total = None
            starts = range(0, len(hidden), rows)
            for start in [*starts[:3], *starts[3:][-1:]] if getattr(_inside, "planned", False) else starts:
                part = slice(start, start + rows)
                found = _chunk(head, hidden[part], targets[part], soft_cap, gradients, part)
                total = found if total is None else total + found
            ctx.save_for_backward(gradients.hidden, *gradients.trained)
            ctx.wanted, ctx.weights, ctx.empty = wanted, len(trained), total is None
            return torch.zeros((), dtype=torch.float32, device=hidden.device) if total is None else total

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            if torch.is_grad_enabled():
                raise Gemma4CompatError(
                    "create_graph=True asks for a second derivative, but a loss in chunks has only the first. Call "
                    "gemma4_compat.train_fast(model, loss=False) for it."
                )
            if ctx.empty:  # the mean of nothing: upstream's loss is NaN and its gradients are zeros
                gradient = torch.ones_like(gradient)
            hidden, *trained = ctx.saved_tensors
            scaled: list[Any] = [None] * ctx.weights
            kept = torch_internals.is_graph_kept()
            for index, found in zip(ctx.wanted, trained, strict=True):  # each as large as the head
                factor = gradient.to(found.device)
                scaled[index] = found * factor if kept else found.mul_(factor)
            first = None if hidden is None else hidden * gradient.to(hidden.device)
            return (first, None, None, None, None, *scaled)

    return ChunkedCrossEntropy


class _Gradients:
    """The gradients of the sum of the losses: for the hidden states and for the head's weights."""

    def __init__(self, hidden: Any, weights: list[Any]) -> None:
        import torch

        self.hidden = None if hidden is None else torch.empty_like(hidden)
        self.weights = weights
        self.trained = [torch.zeros_like(weight) for weight in weights] if weights else []

    @property
    def needed(self) -> bool:
        return self.hidden is not None or bool(self.weights)

    def add(self, part: slice, inputs: Any, logits: Any, gradient: Any) -> None:
        """Add those of one chunk, from the gradient of its logits."""
        import torch

        asked = ([] if self.hidden is None else [inputs]) + self.weights
        found = list(torch.autograd.grad(logits, asked, gradient, allow_unused=True))
        if self.hidden is not None:
            first = found.pop(0)
            self.hidden[part] = 0 if first is None else first
        for index, more in enumerate(found):
            if more is not None:
                self.trained[index] += more


def _chunk(head: Any, hidden: Any, targets: Any, soft_cap: float | None, gradients: _Gradients, part: slice) -> Any:
    """The summed loss of one chunk, a float32 scalar; its gradients are added to ``gradients``."""
    import torch

    inputs = hidden.detach().requires_grad_(gradients.hidden is not None)
    with torch.set_grad_enabled(gradients.needed):
        logits = head(inputs[None])
    values = logits.detach()[0]
    targets = targets.to(values.device)
    if _is_fused(values, soft_cap):
        total = _by_kernel(values, targets, soft_cap, gradients.needed).sum()
    else:
        size = max(1, BLOCK_BYTES // (4 * values.shape[-1]))
        losses = [
            _block(values[first : first + size], targets[first : first + size], soft_cap, gradients.needed)
            for first in range(0, len(values), size)
        ]
        total = torch.cat(losses).sum()
    if gradients.needed:
        gradients.add(part, inputs, logits, values[None])
    return total


def _block(values: Any, targets: Any, soft_cap: float | None, gradient: bool) -> Any:
    """The float32 losses of some tokens. ``values``, their logits, are overwritten with the gradient of the sum."""
    import torch

    if soft_cap is not None:
        values.div_(soft_cap).tanh_()
    log_probabilities = torch.log_softmax(values.float() if soft_cap is None else (values * soft_cap).float(), dim=-1)
    losses = -log_probabilities.gather(1, targets[:, None])[:, 0]
    if gradient:
        found = log_probabilities.exp_()
        if torch.are_deterministic_algorithms_enabled():  # for indices CUDA then sorts, in twenty kernels
            found -= torch.zeros_like(found, dtype=torch.uint8).scatter_(1, targets[:, None], 1)
        else:
            found[torch.arange(len(targets), device=targets.device), targets] -= 1
        found = found.to(values.dtype)
        if soft_cap is not None:
            found = torch.ops.aten.tanh_backward(found.mul_(soft_cap), values).div_(soft_cap)
        values.copy_(found)
    return losses


def _is_fused(values: Any, soft_cap: float | None) -> bool:
    """Whether a kernel computes losses of such logits. It is tried once, and compared with PyTorch's."""
    import torch

    if type(values) is not torch.Tensor or values.device.type not in kernels.COMPILERS or not spec.supports(values):
        return False

    def is_near() -> bool:
        generator = torch.Generator(values.device).manual_seed(0)
        tried = torch.randn((2, values.shape[1]), generator=generator, device=values.device).mul_(9).to(values.dtype)
        targets, both = torch.tensor([5, 1], device=values.device), (tried, tried.clone())
        found, right = (how(one, targets, soft_cap, True) for how, one in zip((_by_kernel, _block), both))
        return bool(torch.allclose(found, right, rtol=1e-5) and torch.allclose(*both, rtol=2**-6, atol=2**-14))

    key = "cross entropy", values.dtype, values.shape[1], soft_cap
    return kernels.of(values.device).selftest(key, "cross entropy", "PyTorch computes the loss in chunks", is_near)


def _by_kernel(values: Any, targets: Any, soft_cap: float | None, gradient: bool) -> Any:
    kernel, losses = spec.kernel_of(values, targets, soft_cap, gradient=gradient)
    known = kernels.of(values.device)
    known.prepare([kernel.text], [])
    known.launch(kernel)
    return losses
