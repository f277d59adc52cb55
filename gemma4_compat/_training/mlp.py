"""The MLPs of a model's text layers in chunks, as ``train_fast`` asks for them; norms go with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine import dormant
from gemma4_compat._engine.io import notice
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._training import mlp_chunks, modules, norms, per_layer, shared_states

ID = modules.ID
#: Tokens of a chunk. With fewer, other parts of a layer are the peak; each chunk dequantizes the weights again.
TOKENS = 2048
ATTRIBUTE = attached.CHUNKED_MLP
_NAMES = ("Gemma4TextMLP", "Gemma4UnifiedTextMLP")
_told: set[str] = set()


def unavailable(model: Any) -> str | None:
    """Why the MLPs of a model cannot be computed in chunks; None if they can."""
    dormant.activate(ID)
    return None if all(modules.is_on(one, "TextMLP") for one in _mlps(model)) else f"the patch {ID} is off"


def ask(model: Any, tokens: int | None = None) -> None:
    """Have the MLPs and norms in ``model`` compute in chunks, without checking whether the patch is applied."""
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


def forget(model: Any) -> None:
    """Have MLPs and norms compute as if nobody had asked; GEMMA4_COMPAT_ENABLE decides."""
    for mlp in _mlps(model):
        vars(mlp).pop(ATTRIBUTE, None)
        in_place.restore(mlp, "forward", forward)
    for part in (norms, shared_states, per_layer):
        part.leave(model)


def _mlps(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if type(module).__name__ in _NAMES)


def forward(mlp: Any, original: Callable[..., Any], x: Any) -> Any:
    """An MLP's forward: (..., hidden) -> (..., hidden), in chunks if that was asked for and something trains."""
    tokens = vars(mlp).get(ATTRIBUTE)
    if tokens is None or not modules.trains(mlp):
        return original(x)
    if x.shape[:-1].numel() <= tokens or not modules.is_on(mlp, "TextMLP"):
        return original(x)
    reason = modules.unsupported_reason(mlp)
    if reason:
        if reason not in _told:
            _told.add(reason)
            notice.warn_user(
                f"MLPs are not computed in chunks, and take the memory of all tokens: {reason}. Call "
                "train_fast(model, mlp=False) if this is intended."
            )
        return original(x)
    return mlp_chunks.apply(
        original,
        x,
        tokens=tokens,
        trained=modules.trained(mlp),
        around=functools.partial(modules.onloaded, mlp),
        module=mlp,
    )
