"""silent: ``merge_and_unload()`` and ``merge_adapter()`` on a 4-bit or 8-bit base give another model than the adapter
loaded onto it.

Upstream says ``Merge lora module to 4-bit linear may get different generations due to rounding errors`` once for each
layer, and never how much. On some tuners the merge ends in ``RuntimeError: The size of tensor a (2048) must match the
size of tensor b (64)`` or an empty ``NotImplementedError``, with part of the model merged.

Why: the merged weight is quantized again, and what an adapter changes is often smaller than one step of a 4-bit grid.

Here: for Gemma 4 models the merge does what it did, bit for bit. While it runs, each layer's new weight is compared
with the exact sum, and one warning says which share of the adapter's change was lost and how to merge without loss. A
tuner that cannot merge into quantized layers is one error before anything is changed.

Goes when PEFT measures what a merge into quantized weights loses.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._models import family, placement
from gemma4_compat._quantization.plain_layers import dequantized, is_quantized, over_plain_weight, scales, with_base

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

#: Of the weight's size: four bits stay below a fifth of it.
_TOLERANCE = 0.5
_UPSTREAM = r"Merge \w+ module to [48]-bit linear may get different generations"
_WITHOUT_LOSS = (
    "To merge without loss, merge into the unquantized checkpoint: gemma4-compat merge BASE ADAPTER FOLDER; or call "
    "dequantize() on this model before merging."
)


def merge_adapter(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with _measured(self):
        return original(self, *args, **kwargs)


def unload_and_optionally_merge(
    original: Callable[..., Any], self: Any, merge: bool = True, *args: Any, **kwargs: Any
) -> Any:
    with _measured(self) if merge else contextlib.nullcontext():
        return original(self, merge, *args, **kwargs)


@contextlib.contextmanager
def _measured(tuner: Any) -> Iterator[None]:
    """Inside, adapter layers over quantized weights measure what their merges lose; afterwards it is said."""
    layers = _quantized_layers(tuner.model) if family.is_gemma4(tuner.model) else {}
    if not layers:
        yield
        return
    tuner._check_merge_allowed()  # what PEFT itself refuses, it says better
    _refuse_tuners_that_cannot_merge(layers)
    losses: dict[str, tuple[float, float]] = {}
    for name, layer in layers.items():
        vars(layer)["merge"] = functools.partial(_merge, layer, name, losses)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_UPSTREAM)
            yield
    finally:
        for layer in layers.values():
            del vars(layer)["merge"]
    _say(losses)


def _quantized_layers(model: Any) -> dict[str, Any]:
    """The adapter layers over quantized weights, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "get_base_layer") and hasattr(module, "merge") and is_quantized(module.get_base_layer())
    }


def _merge(layer: Any, name: str, losses: dict[str, tuple[float, float]], *args: Any, **kwargs: Any) -> None:
    """The layer's own merge; leaves in ``losses[name]`` the squared sums of what it lost and what it should change."""
    import torch

    base = layer.get_base_layer()
    before, done = (base.weight, scales(base)), len(layer.merged_adapters)
    type(layer).merge(layer, *args, **kwargs)
    merged = layer.merged_adapters[done:]
    if not merged:
        return
    try:
        old = dequantized(*before)
        twin = over_plain_weight(layer, old.clone())
        twin.merged_adapters = layer.merged_adapters[:done]
        twin.merge(adapter_names=merged)
        wanted = twin.get_base_layer().weight.detach()
        lost, change = dequantized(base.weight, scales(base)).sub_(wanted), wanted.sub_(old)
        losses[name] = (float(lost.square().sum()), float(change.square().sum()))
    except torch.OutOfMemoryError:  # the merge itself is done; a layer that is not measured is said to be so
        losses[name] = (float("nan"), float("nan"))


def _refuse_tuners_that_cannot_merge(layers: dict[str, Any]) -> None:
    tried: set[type] = set()
    for name, layer in layers.items():
        base = layer.get_base_layer()
        if type(layer) in tried or layer.base_layer is not base or placement.is_offloaded(base):
            continue
        tried.add(type(layer))
        twin, plain = with_base(layer, copy.deepcopy(base)), over_plain_weight(layer)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                twin.merge()
            changed = twin.get_base_layer()
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


def _say(losses: dict[str, tuple[float, float]]) -> None:
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
    warnings.warn(
        f"the adapter was merged into {len(losses)} quantized layers, whose weights were quantized again: {said}, so "
        "the model gives other answers than with the adapter loaded, and unmerging does not bring the base back. "
        f"{_WITHOUT_LOSS}",
        Gemma4CompatWarning,
        stacklevel=7,
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


PATCH = Patch(
    id="peft-quantized-merge",
    summary="a merge into quantized weights says what it loses, once, and how to merge without loss",
    symptom="silent: merge_and_unload() into a 4-bit or 8-bit base gives another model; hundreds of warnings say that "
    "it may",
    severity=Severity.WRONG_RESULT,
    failure_points=("F7",),
    distribution="peft",
    affected=">=0.18.0",
    measured="0.21.2",
    requires=("bitsandbytes", "transformers>=5.5"),
    retire_when="PEFT measures what a merge into quantized weights loses",
    targets=(
        Target(
            module="peft.tuners.tuners_utils",
            name="BaseTuner.merge_adapter",
            replacement=merge_adapter,
            known={
                "505823a479f2": "0.18.0 - 0.21.2",
            },
        ),
        Target(
            module="peft.tuners.tuners_utils",
            name="BaseTuner._unload_and_optionally_merge",
            replacement=unload_and_optionally_merge,
            known={
                "44384b5d4d10": "0.18.0 - 0.18.1",
                "c2ac39c9b643": "0.19.0 - 0.20.0",
                "f504312c4990": "0.21.0 - 0.21.2",
            },
        ),
    ),
    reproduce=reproduce,
)
