"""The forward of a Gemma 4 model with labels, its loss computed in chunks as ``train_fast`` asks for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine import changes, settings
from gemma4_compat._engine.fingerprint import foreign, library
from gemma4_compat._engine.io import notice
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.models import walk
from gemma4_compat._offload import torch_internals
from gemma4_compat._training import chunks, modules, sharded

ID = "transformers-chunked-loss"
_TRAINING, _ALWAYS, _NEVER = "training", "always", "never"
ATTRIBUTE, _WARNED = attached.CHUNKED_LOSS, attached.CHUNKED_LOSS_WARNED  # the first is one of the three
_IGNORED = -100
_EAGER: list[Callable[..., Any]] = []  # `_mean`, run eagerly between the graphs of torch.compile


def unavailable(model: Any) -> str | None:
    """Why the loss of a model cannot be computed in chunks; None if it can."""
    inner = walk.unwrapped(model)
    if not hasattr(inner, "lm_head") or "labels" not in inspect.signature(type(inner).forward).parameters:
        return "the model has no language modeling head"
    kind = type(inner)
    if changes.is_on(kind.forward, ID):
        return None
    if (other := foreign(kind.forward, "transformers", changes.is_installed)) is not None:
        who = library(other) or "one"
        return (
            f"{other} is in the place of {kind.__name__}.forward, or around it: {who} or the loss in chunks, not both"
        )
    return f"the patch {ID} is not applied to {kind.__name__}.forward"


def ask(model: Any, *, evaluation: bool = False) -> None:
    """Mark the model for a loss in chunks. ``evaluation``: in evaluation mode as well."""
    _run_eagerly()
    setattr(walk.unwrapped(model), ATTRIBUTE, _ALWAYS if evaluation else _TRAINING)


def leave(model: Any) -> None:
    """Mark the model for a loss of all tokens at once, whatever GEMMA4_COMPAT_ENABLE says."""
    setattr(walk.unwrapped(model), ATTRIBUTE, _NEVER)


def forget(model: Any) -> None:
    """Take the mark off; GEMMA4_COMPAT_ENABLE decides."""
    for name in (ATTRIBUTE, _WARNED):
        vars(walk.unwrapped(model)).pop(name, None)


def forward(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model with a head. Its loss is computed in chunks if that was requested."""
    if not _is_asked_for(self):
        return original(self, *args, **kwargs)
    if args:
        kwargs.update(zip(_positional(original), args, strict=False))
        args = ()
    reason = _unsupported_reason(self, kwargs)
    if reason is None:
        return _returned(self, kwargs.pop("return_dict", None), _forward(original, self, **kwargs))
    if reason:
        _tell(self, reason)
    return original(self, **kwargs)


def _is_asked_for(model: Any) -> bool:
    chosen = vars(model).get(ATTRIBUTE)
    if chosen is None:
        return model.training and settings.is_enabled(ID)
    return chosen == _ALWAYS or (chosen == _TRAINING and bool(model.training))


def _unsupported_reason(model: Any, given: dict[str, Any]) -> str | None:
    """None if the loss can be computed in chunks; else the reason, or "" if no loss in chunks is expected."""
    import torch
    from transformers.loss.loss_utils import ForCausalLMLoss

    if given.get("labels") is None:
        if not (model.training and torch.is_grad_enabled()):
            return ""
        return "no labels were given, as by a Trainer with label_smoothing_factor or compute_loss_func"
    keep = given.get("logits_to_keep", 0)
    if not isinstance(keep, int) or keep:
        return ""
    if model.loss_function is not ForCausalLMLoss:
        return f"the model has its own loss function, {model.loss_function!r}"
    return None


def _tell(model: Any, reason: str) -> None:
    warned = vars(model).setdefault(_WARNED, set())
    if reason not in warned:
        warned.add(reason)
        notice.warn_user(
            f"the loss of {type(model).__name__} is not computed in chunks, and the logits of all tokens take their "
            f"memory: {reason}. Call train_fast(model, loss=False) if this is intended."
        )


@functools.cache
def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)[1:]


def _forward(
    original: Callable[..., Any], model: Any, labels: Any = None, logits_to_keep: int = 0, **kwargs: Any
) -> Any:
    """Upstream's output with a loss and without logits."""
    upstream = inspect.unwrap(original)
    if "pixel_values" in upstream.__code__.co_varnames[: upstream.__code__.co_argcount]:
        outputs = model.model(**kwargs, labels=labels, return_dict=True)
    else:
        outputs = model.model(**kwargs, return_dict=True)
    if "loss_function" not in upstream.__code__.co_names:  # before transformers 5.6
        labels, kwargs = _as_before_5_6(labels, kwargs)
    loss = _loss(model, outputs.last_hidden_state, labels, **kwargs)
    kind = upstream.__annotations__["return"]
    fields = kind.__dataclass_fields__
    return kind(loss=loss, **{name: getattr(outputs, name, None) for name in fields if name not in ("loss", "logits")})


def _as_before_5_6(labels: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Labels and options of a loss that always leaves out padding and averages the rest, whatever the options say."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        labels = labels.masked_fill(mask[:, -labels.shape[1] :].to(labels.device) == 0, _IGNORED)
    return labels, {}


def _returned(model: Any, return_dict: bool | None, outputs: Any) -> Any:
    """Return ``outputs`` as upstream's ``can_return_tuple`` does."""
    wanted = getattr(model.config, "return_dict", True) if return_dict is None else return_dict
    return outputs if wanted else outputs.to_tuple()


def _loss(
    model: Any,
    hidden_states: Any,
    labels: Any,
    *,
    num_items_in_batch: Any = None,
    ignore_index: int = _IGNORED,
    shift_labels: Any = None,
    **_: Any,
) -> Any:
    """``ForCausalLMLoss`` of the model's logits: a float32 scalar on the device of its head."""
    import torch

    config = model.config.get_text_config()
    _run_eagerly()
    return _EAGER[0](
        model.lm_head,
        hidden_states,
        torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels,
        num_items_in_batch,
        ignore_index,
        config.vocab_size,
        config.final_logit_softcapping,
    )


def _run_eagerly() -> None:
    import torch

    if not _EAGER:
        _EAGER.append(torch.compiler.disable(_mean))


def _mean(
    lm_head: Any,
    hidden_states: Any,
    targets: Any,
    num_items: Any,
    ignored: int,
    vocabulary: int,
    soft_cap: float | None,
) -> Any:
    """The mean over the targets that are not ignored, or the sum divided by ``num_items``."""
    import torch

    targets = targets.reshape(-1)
    if torch_internals.is_fake(targets):  # its values are unknown: none is ignored
        rows = torch.arange(len(targets), device=targets.device)
    else:
        rows = (targets != ignored).nonzero()[:, 0]
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    states = states.index_select(0, rows.to(states.device))

    def summed(states: Any) -> Any:
        device = next((weight.device for weight in lm_head.parameters()), states.device)
        return chunks.cross_entropy(
            lm_head,
            states.to(device),
            targets[rows].to(device),
            vocabulary=vocabulary,
            soft_cap=soft_cap,
            trained=modules.trained(lm_head),
            plain=next(lm_head.children(), None) is None,
        )

    with modules.onloaded(lm_head):
        total = sharded.call(lm_head, states, summed)
    if num_items is None:
        return total / len(rows)
    return total / (num_items.to(total.device) if torch.is_tensor(num_items) else num_items)
