"""A merge into quantized weights reports once what it loses, and how to merge without loss.

Symptom: silent: ``merge_and_unload()`` and ``merge_adapter()`` on a 4-bit or 8-bit base give different outputs from
the adapter loaded onto it. Upstream warns once per layer, hundreds of times, that ``Merge lora module to 4-bit
linear may get different generations due to rounding errors``, and never says by how much. With some tuners the merge
raises ``RuntimeError: The size of tensor a (2048) must match the size of tensor b (64)`` or an empty
``NotImplementedError``, with part of the model already merged.

Cause: The ``merge`` of PEFT's bitsandbytes layers quantizes the merged weight again, and the change that an adapter
makes is often smaller than one step of a 4-bit grid.

Fix: On Gemma 4 models the merge produces the same bits as before. While it runs, the patch compares the new weight of
each layer with the exact sum. One warning, which replaces upstream's, says which share of the adapter's change was
lost and how to merge without loss. A tuner that cannot merge into quantized layers raises one error before anything is
changed.

Remove when: PEFT measures what a merge into quantized weights loses.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization.plain_layers import (
    dequantized,
    is_quantized,
    over_plain_weight,
    scales,
    with_base,
)
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F7", kind="notice", severity="wrong_result", affected=">=0.18.0", requires="bitsandbytes transformers>=5.5"
)

#: Relative to the weight's norm; 4-bit merges stay below 0.2.
_TOLERANCE = 0.5
_UPSTREAM = r"Merge \w+ module to [48]-bit linear may get different generations"
_WITHOUT_LOSS = (
    "To merge without loss, merge into the unquantized checkpoint: gemma4-compat merge BASE ADAPTER FOLDER; or call "
    "dequantize() on this model before merging."
)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.merge_adapter")
def merge_adapter(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    with _measured(self):
        return original(self, *args, **kwargs)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner._unload_and_optionally_merge")
def unload_and_optionally_merge(original: Original, self: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
    with _measured(self) if merge else contextlib.nullcontext():
        return original(self, merge, *args, **kwargs)


@contextlib.contextmanager
def _measured(tuner: Any) -> Iterator[None]:
    """Inside, adapter layers over quantized weights measure what their merges lose; afterwards it is reported."""
    layers = _quantized_layers(tuner.model) if family.has_parts(tuner.model) else {}
    if not layers:
        yield
        return
    tuner._check_merge_allowed()  # PEFT's own refusals are clearer
    _refuse_tuners_that_cannot_merge(layers)
    losses: dict[str, tuple[float, float]] = {}
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        for name, layer in layers.items():
            stack.enter_context(in_place.replaced(layer, "merge", functools.partial(_merge, layer, name, losses)))
        warnings.filterwarnings("ignore", message=_UPSTREAM)
        yield
    _warn_of_losses(losses)


def _quantized_layers(model: Any) -> dict[str, Any]:
    """The adapter layers over quantized weights, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "get_base_layer") and hasattr(module, "merge") and is_quantized(module.get_base_layer())
    }


def _merge(
    layer: Any, name: str, losses: dict[str, tuple[float, float]], merge: Any, *args: Any, **kwargs: Any
) -> None:
    """The layer's own merge; sets ``losses[name]`` to the squared norms of the error and of the intended change."""
    import torch

    base = layer.get_base_layer()
    before, done = (base.weight, scales(base)), len(layer.merged_adapters)
    merge(*args, **kwargs)
    merged = layer.merged_adapters[done:]
    if not merged:
        return
    try:
        old = dequantized(*before)
        copied = over_plain_weight(layer, old.clone())
        copied.merged_adapters = layer.merged_adapters[:done]
        copied.merge(adapter_names=merged)
        wanted = copied.get_base_layer().weight.detach()
        lost, change = dequantized(base.weight, scales(base)).sub_(wanted), wanted.sub_(old)
        losses[name] = (float(lost.square().sum()), float(change.square().sum()))
    except torch.OutOfMemoryError:  # the merge is done; only its error is not measured
        losses[name] = (float("nan"), float("nan"))


def _refuse_tuners_that_cannot_merge(layers: dict[str, Any]) -> None:
    tried: set[type] = set()
    for name, layer in layers.items():
        base = layer.get_base_layer()
        if type(layer) in tried or layer.base_layer is not base or module_hooks.is_offloaded(base):
            continue
        tried.add(type(layer))
        copied, plain = with_base(layer, copy.deepcopy(base)), over_plain_weight(layer)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                copied.merge()
            changed = copied.get_base_layer()
            found = dequantized(changed.weight, scales(changed))
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            raise _refusal(layer, name, " ".join(str(error).split()) or type(error).__name__) from error
        plain.merge()
        wanted = plain.get_base_layer().weight.detach()
        if found.shape != wanted.shape:
            raise _refusal(layer, name, f"the weight gets the shape {list(found.shape)}, not {list(wanted.shape)}")
        share = float((found - wanted).norm() / wanted.norm())
        if not share < _TOLERANCE:
            raise _refusal(layer, name, f"the merged weight is wrong by {share:.1f} times its size")


def _refusal(layer: Any, name: str, reason: str) -> Gemma4CompatError:
    tuner = type(layer).__module__.split(".")[2]
    return Gemma4CompatError(
        f"this release of PEFT cannot merge {tuner} adapters into quantized layers such as {name!r} ({reason}). "
        f"Nothing was changed. {_WITHOUT_LOSS}"
    )


def _warn_of_losses(losses: dict[str, tuple[float, float]]) -> None:
    measured = {name: values for name, values in losses.items() if values[1] > 0}  # no NaN either
    if not losses:
        return
    if measured:
        shares = {name: (lost / change) ** 0.5 for name, (lost, change) in measured.items()}
        lost, change = (sum(values) for values in zip(*measured.values()))
        worst = max(shares, key=shares.__getitem__)
        said = (
            f"the error this makes is {100 * (lost / change) ** 0.5:.0f} % of the adapter's whole change "
            f"({100 * shares[worst]:.0f} % in {worst!r})"
        )
    else:
        said = "how much of the adapter's change that loses could not be measured"
    notice.warn_user(
        f"the adapter was merged into {len(losses)} quantized layers, whose weights were quantized again: {said}, so "
        "the model gives different outputs than with the adapter loaded, and unmerging does not bring the base back. "
        f"{_WITHOUT_LOSS}"
    )


def reproduce(workspace: Workspace) -> Outcome:
    import warnings

    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.load("4bit"), workspace.adapter("language"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.merge_and_unload()
    texts = [str(warning.message) for warning in caught]
    measured = [text for text in texts if "% of the adapter's whole change" in text]
    vague = [text for text in texts if "may get different generations" in text]
    if len(measured) == 1 and not vague:
        return Outcome(False, f"one warning: {measured[0]}")
    return Outcome(True, f"{len(vague)} warnings about rounding errors, none says what is lost")
