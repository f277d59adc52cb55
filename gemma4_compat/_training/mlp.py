"""The MLPs of a model's text layers in pieces, and ``gemma4_compat.chunked_mlp``, which asks for norms as well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gemma4_compat._accelerate import attached
from gemma4_compat._common import arguments, in_place, notice
from gemma4_compat._engine import sleep
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import family
from gemma4_compat._training import head, norms, per_layer, pieces, shared_states, whole

ID = whole.ID
#: Tokens of a piece. With fewer, other parts of a layer are the peak; each piece dequantizes the weights again.
TOKENS = 2048
ATTRIBUTE = attached.CHUNKED_MLP
_NAMES = ("Gemma4TextMLP", "Gemma4UnifiedTextMLP")
_Model = TypeVar("_Model")
_told: set[str] = set()


def chunked_mlp(model: _Model, *, tokens: int | None = None, enabled: bool = True) -> _Model:
    """Have the MLPs of a Gemma 4 model compute a few tokens at a time in training, and keep only their inputs.

    >>> model = gemma4_compat.chunked_mlp(model)
    >>> model(input_ids=ids, labels=ids).loss.backward()

    The intermediates of an MLP (gate, activation, product, what LoRA adds, and their gradients) are the largest part
    of a layer in training. Here those of one piece exist at once. The backward pass computes each piece again, so an
    MLP runs forward once more per step (docs/TRAINING.md has what that saves).
    It needs no gradient checkpointing, and goes with it. With ``create_graph=True`` it computes all tokens at once.

    Outputs and gradients differ from upstream's by rounding, where a matrix product of fewer rows is summed in another
    order; gradients of weights are sums over pieces. LoRA's dropout draws other random numbers, and the same ones when
    a piece is computed again. Weights may be quantized, offloaded (they are copied in once for all pieces of a
    forward, and once for those of a backward pass), adapted or trained. Experts are not MLPs in this sense; the dense
    MLP beside them is.

    Norms of text layers are computed in pieces as well, unless they are trained, and keep their 16-bit inputs instead
    of float32 copies. What nobody reads is left out: the graph of shared keys and values that checkpointing computes
    again, and what per-layer inputs add to the gradient of embeddings of text, where the table is frozen. These three
    change no bit of the loss, or of the gradient of a weight.

    Only steps with gradients in training mode change, and only those of more than ``tokens`` tokens, of all sequences
    of the batch together. ``torch.compile`` compiles the MLP as it is. MLPs that FSDP, DeepSpeed ZeRO-3 or tensor
    parallelism shards, and those whose adapter looks at whole sequences (aLoRA, X-LoRA), are left as they are, with
    one warning. A pickle of the model has no pieces.

    ``GEMMA4_COMPAT_ENABLE=transformers-chunked-mlp`` does the same for every Gemma 4 model of the process.

    Args:
        model: a transformers model, quantized, dispatched or not, or a PEFT model, DDP or another wrapper around one.
        tokens: of a piece, at most; by default 2,048.
        enabled: False undoes it.

    Returns:
        ``model`` itself.

    Raises:
        Gemma4CompatError: it is not a Gemma 4 model with text layers, ``tokens`` is not a positive integer, or the
            patch ``transformers-chunked-mlp`` is off.
    """
    tokens = TOKENS if tokens is None else tokens
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise Gemma4CompatError(f"tokens is {tokens!r}; a piece has at least 1 token, and a whole number of them")
    found = list(_mlps(model))
    if not found or not any(family.is_gemma4(module) for module in _modules(model)):
        raise Gemma4CompatError(f"chunked_mlp requires a Gemma 4 model with text layers; got {arguments.shown(model)}")
    if enabled:
        sleep.awaken(ID)
        if not all(whole.is_on(one, "TextMLP") for one in found):
            raise Gemma4CompatError(
                f"chunked_mlp needs the patch {ID}, which is not applied here: gemma4_compat.status()[{ID!r}] says why"
            )
        ask(model, tokens)
    else:
        for mlp in found:
            vars(mlp).pop(ATTRIBUTE, None)
            in_place.restore(mlp, "forward", forward)
        for part in (norms, shared_states, per_layer):
            part.leave(model)
    return model


def ask(model: Any, tokens: int | None = None) -> None:
    """Have the MLPs and norms in ``model`` compute in pieces, without checking whether the patch is applied."""
    tokens = TOKENS if tokens is None else tokens
    for mlp in _mlps(model):
        setattr(mlp, ATTRIBUTE, tokens)
        in_place.replace(mlp, "forward", functools.partial(forward, mlp))
    for part in (norms, shared_states, per_layer):
        part.ask(model, tokens)


def ask_once(model: Any) -> None:
    """The same for those MLPs that were not asked yet."""
    if any(ATTRIBUTE not in vars(mlp) for mlp in _mlps(model)):
        ask(model)


def leave(model: Any) -> None:
    """Have the MLPs in ``model`` compute all tokens at once, whatever GEMMA4_COMPAT_ENABLE says."""
    for mlp in _mlps(model):
        setattr(mlp, ATTRIBUTE, None)


def _modules(model: Any) -> Iterator[Any]:
    return iter(()) if isinstance(model, type) or not hasattr(model, "modules") else iter(model.modules())


def _mlps(model: Any) -> Iterator[Any]:
    return (module for module in _modules(model) if type(module).__name__ in _NAMES)


def forward(mlp: Any, original: Callable[..., Any], x: Any) -> Any:
    """An MLP's forward: (..., hidden) -> (..., hidden), in pieces if that was asked for and something trains."""
    import torch

    tokens = vars(mlp).get(ATTRIBUTE)
    if tokens is None or not (mlp.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return original(x)
    if x.shape[:-1].numel() <= tokens or whole.is_traced() or not whole.is_on(mlp, "TextMLP"):
        return original(x)
    reason = whole.unsupported_reason(mlp)
    if reason:
        if reason not in _told:
            _told.add(reason)
            notice.warn_user(
                f"MLPs are not computed in pieces, and take the memory of all tokens: {reason}. Call "
                "chunked_mlp(model, enabled=False) if this is intended."
            )
        return original(x)
    return pieces.apply(
        original,
        x,
        tokens=tokens,
        trained=head.trained(mlp),
        around=functools.partial(head.onloaded, mlp),
        module=mlp,
    )
