"""``ValueError: Target module Gemma4ClippableLinear(...) is not supported``

Raised by ``get_peft_model`` and by every adapter load whose target names (``q_proj``, ``up_proj``, ...) reach into the
vision or audio tower.

Why: the towers wrap their linears in ``Gemma4ClippableLinear``, which clamps input and output and is not an
``nn.Linear``; PEFT chooses the adapter layer by type.

Here: just before PEFT matches names, the config is rewritten so that a wrapper is excluded and its inner ``.linear``
is targeted instead. The clamps stay around the adapted layer, keys read ``...q_proj.linear.lora_A.weight`` as in
adapters made elsewhere, and the saved config says exactly that, so it loads in a PEFT without this patch. A wrapper
and its inner layer that both match are adapted once. ``rank_pattern``, ``alpha_pattern`` and IA3's
``feedforward_modules`` follow.

Goes when PEFT adapts the wrapper, or transformers makes it an ``nn.Linear``; no release does so far.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gemma4_compat import _walk
from gemma4_compat._patch import Patch, Severity, Target

if TYPE_CHECKING:
    from gemma4_compat._repro import Outcome, Workspace

INNER = "linear"
_ABSENT = object()


def maybe_include_all_linear_layers(original: Callable[..., Any], peft_config: Any, model: Any) -> Any:
    # The last step before the matching, for every tuner: "all-linear" and default targets are resolved by then.
    peft_config = original(peft_config, model)
    if getattr(peft_config, "target_modules", None):
        redirect(peft_config, model)
    return peft_config


def redirect(config: Any, model: Any) -> None:
    """Rewrite ``config`` in place so that it targets the inner layer of every clipped linear that it matches.

    Args:
        config: a PEFT config with ``target_modules`` set (names or regular expression).
        model: the model it will be applied to, without PEFT's prefix.
    """
    matched = matched_wrappers(config, model)
    if not matched:
        return
    keys = [name for name, _ in model.named_modules() if name]
    inner = {f"{name}.{INNER}" for name in matched if not _excluded(config, f"{name}.{INNER}")}
    wanted = {key for key in keys if _matches(config, key)} - set(matched) | inner

    compact = copy.copy(config)
    compact.target_modules = _with_inner(config.target_modules, matched)
    compact.exclude_modules = _excluding(getattr(config, "exclude_modules", None), matched)
    if _has_field(config, "exclude_modules") and {key for key in keys if _matches(compact, key)} == wanted:
        config.target_modules, config.exclude_modules = compact.target_modules, compact.exclude_modules
    else:  # a tuner without exclusions, or a pattern that cannot be extended (a look-around at its end)
        config.target_modules = wanted
    for attribute in ("rank_pattern", "alpha_pattern"):
        if patterns := getattr(config, attribute, None):
            setattr(config, attribute, _patterns_with_inner(patterns, matched))
    if feedforward := getattr(config, "feedforward_modules", None):
        config.feedforward_modules = _with_inner(feedforward, matched)


def matched_wrappers(config: Any, model: Any) -> list[str]:
    """Names of the clipped linears that ``config``, as it is, targets."""
    wrappers = [name for name, module in _walk.named_modules(model) if is_wrapper(module)]
    return [name for name in wrappers if _matches(config, name)]


def is_wrapper(module: Any) -> bool:
    """Whether this is a clipped linear of any Gemma 4 variant (each has a class of its own) around one inner layer."""
    return type(module).__name__.endswith("ClippableLinear") and INNER in getattr(module, "_modules", {})


def _has_field(config: Any, name: str) -> bool:
    """Whether the config saves ``name``; an attribute that is not a field is lost on the way to disk."""
    return name in {field.name for field in dataclasses.fields(config)}


def _matches(config: Any, key: str) -> bool:
    return bool(_check()(config, key))


def _excluded(config: Any, key: str) -> bool:
    return type(_check()(config, key)).__name__ == "_ExcludedModule"


def _check() -> Callable[[Any, str], Any]:
    function: Callable[[Any, str], Any] = vars(sys.modules["peft.tuners.tuners_utils"])["check_target_module_exists"]
    return function


def _with_inner(targets: Any, matched: Iterable[str]) -> Any:
    """Targets that match what they matched before, and the inner layers of ``matched``."""
    if isinstance(targets, str):
        flags, pattern = _split_flags(targets)
        return rf"{flags}(?:{pattern})(?:\.{INNER})?"
    added = {name for name in targets if any(key == name or key.endswith(f".{name}") for key in matched)}
    return set(targets) | {f"{name}.{INNER}" for name in added}


def _excluding(excluded: Any, matched: Iterable[str]) -> str:
    """A regular expression for what ``excluded`` (names, pattern or None) and ``matched`` say."""
    flags, patterns = "", []
    if isinstance(excluded, str):
        flags, pattern = _split_flags(excluded)
        patterns = [pattern]
    elif excluded:
        patterns = [rf"(?:.*\.)?{re.escape(name)}" for name in sorted(excluded)]
    by_tower: dict[str, set[str]] = {}
    for name in matched:
        parts = name.split(".")
        by_tower.setdefault(".".join(parts[:2]), set()).add(parts[-1])
    for tower, names in sorted(by_tower.items()):
        patterns.append(rf"{re.escape(tower)}\..*\.(?:{'|'.join(sorted(names))})")
    return flags + "|".join(f"(?:{pattern})" for pattern in patterns)


def _split_flags(pattern: str) -> tuple[str, str]:
    """Inline flags such as ``(?i)``, which may only stand at the start of an expression, and what follows them."""
    flags = re.match(r"\(\?[aiLmsux]+\)", pattern)
    return (flags.group(), pattern[flags.end() :]) if flags else ("", pattern)


def _patterns_with_inner(patterns: dict[str, Any], matched: list[str]) -> dict[str, Any]:
    """``patterns``, so extended that an inner layer gets the value its wrapper gets. The order, which decides, is
    kept.
    """
    find = vars(sys.modules["peft.utils.other"])["get_pattern_key"]
    used = {find(patterns.keys(), name) for name in matched}
    extended: dict[str, Any] = {}
    for pattern, value in patterns.items():
        extended[pattern] = value
        if pattern in used:
            extended.setdefault(rf"(?:{pattern})\.{INNER}", value)
    exact: dict[str, Any] = {}  # for patterns that cannot be extended, such as those that end in $
    for name in matched:
        wanted, found = find(patterns.keys(), name), find(extended.keys(), f"{name}.{INNER}")
        if wanted in patterns and extended.get(found, _ABSENT) != patterns[wanted]:
            exact[re.escape(f"{name}.{INNER}")] = patterns[wanted]
    return exact | extended


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    from gemma4_compat._repro import Outcome, difference

    workspace.needs("clipped_linears")
    explicit = PeftModel.from_pretrained(workspace.load(), workspace.adapter("all"))
    values = {name: value for name, value in explicit.state_dict().items() if "lora_" in name}
    reference = workspace.answers(explicit)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "ffw_layer_1"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names)
    model = get_peft_model(workspace.load(), config)
    adapted = {name for name in model.state_dict() if "lora_" in name}
    if adapted != set(values):
        return Outcome(
            True, f"{len(adapted ^ set(values))} adapter weights differ in name from targeting .linear by hand"
        )
    with torch.no_grad():
        model.load_state_dict(values, strict=False)
    found = difference(reference, workspace.answers(model.eval()))
    return Outcome.of_parity(found, f"{', '.join(names[:2])}, ... reach {len(values) // 2} layers")


PATCH = Patch(
    id="peft-clippable-linear",
    summary="adapters reach the linears inside Gemma 4's clipped vision and audio layers",
    symptom="ValueError: Target module Gemma4ClippableLinear(...) is not supported",
    severity=Severity.CRASH,
    failure_points=("F4",),
    distribution="peft",
    affected=">=0.18.0",
    measured="0.21.2",
    bug=("https://github.com/huggingface/peft/issues/3129",),
    retire_when="PEFT adapts Gemma4ClippableLinear, or transformers makes it an nn.Linear",
    targets=(
        Target(
            module="peft.tuners.tuners_utils",
            name="_maybe_include_all_linear_layers",
            replacement=maybe_include_all_linear_layers,
            known={"5743c15056c3": "0.18.0 - 0.19.1", "fe528186babc": "0.20.0 - 0.21.2"},
        ),
    ),
    reproduce=reproduce,
)
