"""Device maps: which entry holds a tensor, what a map misses, what matches nothing. Imports nothing upstream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._errors import Gemma4CompatError

#: Names of Gemma 4's modules in other model families and older Gemma code.
_OTHER_NAMES = {
    "multi_modal_projector": ("embed_vision", "embed_audio"),
    "mm_projector": ("embed_vision", "embed_audio"),
    "vision_model": ("vision_tower",),
    "visual": ("vision_tower",),
    "audio_model": ("audio_tower",),
    "text_model": ("language_model",),
    "wte": ("embed_tokens",),
}
#: Modules that only some members of the family have: an entry that matches nothing is not a mistake.
_FAMILY = {
    *("vision_tower", "audio_tower", "embed_vision", "embed_audio", "lm_head", "router", "experts"),
    *("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"),
}
_LISTED = 5  # names in one message


def entry_for(name: str, placement: Mapping[str, Any]) -> str | None:
    """The most specific key of a device map that holds the module or tensor ``name``; None if no key does."""
    while name not in placement:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def ancestors(name: str) -> Iterable[str]:
    """Every module around ``name``, the innermost first and the model itself, ``""``, last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def is_nested(placement: Mapping[str, Any]) -> bool:
    """Whether an entry is inside another entry."""
    return any(around in placement for name in placement for around in ancestors(name))


def with_buffers(model: Any, placement: Mapping[str, Any]) -> dict[str, Any]:
    """A map with an added entry for each buffer that it left out.

    ``infer_auto_device_map``, accelerate's and transformers', replaces a module that it splits by its submodules and
    parameters, and forgets its buffers. Such a buffer goes where the first part of its module computes: accelerate
    offloads a buffer only with the module that has it.
    """
    completed = dict(placement)
    main = next((device for device in placement.values() if device not in ("cpu", "disk")), "cpu")
    for name, _ in model.named_buffers():
        if entry_for(name, placement) is None:
            prefix = f"{name.rpartition('.')[0]}."
            beside = (device for part, device in placement.items() if part.startswith(prefix))
            completed[name] = next((device for device in beside if device not in ("cpu", "disk")), main)
    return completed


def check(model: Any, placement: Mapping[str, Any]) -> None:
    """Refuse a map that cannot work, before anything is loaded or moved; warn of entries that match nothing.

    Raises:
        Gemma4CompatError: an entry's device does not exist here, or a module has no device.
    """
    check_devices(placement)
    check_complete(model, placement)
    unmatched = [name for name in placement if name and not exists(model, name) and not _is_absent(model, name)]
    if unmatched:
        _warn_unmatched(model, "device_map", unmatched)


def check_devices(placement: Mapping[str, Any]) -> None:
    """Raise :class:`Gemma4CompatError` for a device that this machine does not have."""
    for name, device in placement.items():
        if problem := _problem(device):
            raise Gemma4CompatError(
                f"device_map places {name or 'the model'!r} on {device!r}: {problem}. Use an accelerator's index (0), "
                "its name ('cuda:0'), 'cpu' or 'disk'. Nothing was loaded or moved."
            )


def check_complete(model: Any, placement: Mapping[str, Any]) -> None:
    """Raise :class:`Gemma4CompatError` if no entry covers a parameter or a saved buffer.

    Anything a map leaves out is loaded to the CPU, so a map for the CPU needs no more. In a map of one device, a
    weight tied to a weight with a device has that device.
    """
    devices = set(placement.values())
    if "" in placement or devices == {"cpu"}:
        return
    tied = {} if len(devices) > 1 else getattr(model, "all_tied_weights_keys", None) or {}
    forgotten = [
        name
        for name in model.state_dict()
        if entry_for(name, placement) is None and entry_for(tied.get(name, name), placement) is None
    ]
    if not forgotten:
        return
    around = {around for name in placement for around in ancestors(name)}  # modules that are placed in parts
    missing: dict[str, None] = {}
    for name in forgotten:
        # The largest enclosing module in which the map places nothing, or else the tensor itself.
        holds_nothing = [module for module in ancestors(name) if module not in around]
        missing[holds_nothing[-1] if holds_nothing else name] = None
    raise Gemma4CompatError(
        f"device_map gives no device for {_listed(missing)}. Add "
        "entries for these, or a catch-all entry '' for everything that is not named. Nothing was loaded or moved."
    )


def warn_unmatched_skips(model: Any, entries: Iterable[str], matches: Any) -> None:
    """Warn of entries of ``llm_int8_skip_modules`` that keep no module of ``model`` from being quantized.

    ``matches(module name, entry)`` is transformers' own rule.
    """
    import torch

    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    unmatched, around = [], {}
    for entry in entries:
        if any(matches(name, entry) for name in linears):
            continue
        found = [name for name, _ in model.named_modules() if matches(name, entry)]
        if containers := [name for name in found if any(linear.startswith(f"{name}.") for linear in linears)]:
            around[entry] = containers
        elif not found and not _is_absent(model, entry) and not exists(model, entry):
            unmatched.append(entry)
    if unmatched:
        _warn_unmatched(model, "llm_int8_skip_modules", unmatched)
    if around:
        _warn_containers(around)


def exists(model: Any, name: str) -> bool:
    """Whether a dotted name is a module, a parameter or a buffer of the model."""
    owner, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return False
    return any(last in vars(module)[table] for table in ("_modules", "_parameters", "_buffers"))


def _is_absent(model: Any, name: str) -> bool:
    """Whether ``name`` names a part of Gemma 4 that this model does not have anywhere."""
    last = name.rpartition(".")[2]
    return last in _FAMILY and not any(module.rpartition(".")[2] == last for module, _ in model.named_modules())


def nearest(model: Any, name: str) -> list[str]:
    """The modules that the author of ``name`` most likely meant, best first."""
    import difflib  # here: it costs every import of the package otherwise

    names = [module for module, _ in model.named_modules() if module]
    parts = name.split(".")
    for length in range(len(parts), 0, -1):  # the same tail elsewhere: model.layers.3 -> model.language_model.layers.3
        tail = parts[-length:]
        found = [module for module in names if module.split(".")[-length:] == tail]
        if found and (length > 1 or not tail[0].isdigit()):
            return found[:2]
    for part in reversed(parts):
        renamed = _OTHER_NAMES.get(part, ())
        found = [module for new in renamed for module in names if module.rpartition(".")[2] == new]
        if found:
            return found[:2]
    return difflib.get_close_matches(name, names, n=2, cutoff=0.0)


def _warn_unmatched(model: Any, where: str, unmatched: list[str]) -> None:
    meant = _listed(unmatched, "; ", lambda name: f"{name!r} (nearest: {', '.join(nearest(model, name))})")
    notice.warn_user(
        f"{where} names modules that {type(model).__name__} does not have, so these entries have no effect: {meant}."
    )


def _warn_containers(around: Mapping[str, list[str]]) -> None:
    def shown(entry: str) -> str:
        names = around[entry]
        if len(names) <= 2:
            return f"{entry!r} (write {' and '.join(repr(name) for name in names)})"
        return f"{entry!r} (write each of the {len(names)} paths: {names[0]!r} ...)"

    notice.warn_user(
        "llm_int8_skip_modules names modules by the end of their path, which does not reach the linear layers inside: "
        f"they are quantized all the same. {_listed(around, '; ', shown)}. gemma4_compat.quantization_skip_modules "
        "names what is worth keeping."
    )


def _listed(names: Iterable[str], separator: str = ", ", shown: Callable[[str], str] = str) -> str:
    found = list(names)
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return separator.join(map(shown, found[:_LISTED])) + more


def _problem(device: Any) -> str:
    """What is wrong with a device of a map; empty if nothing is."""
    import torch

    if device in ("disk", "cpu", "meta"):
        return ""
    if isinstance(device, int):
        accelerator = getattr(torch, "accelerator", None)
        if accelerator is None:  # before torch 2.6 the kinds of accelerators are not listed: left to upstream
            return ""
        found: int = accelerator.device_count()
        return "" if 0 <= device < found else f"this machine has {found or 'no'} accelerator{'s' * (found != 1)}"
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        return "no such device"
    backend: Any = getattr(torch, parsed.type, None)
    if parsed.type in ("cpu", "meta") or not hasattr(backend, "device_count"):
        return ""
    count: int = backend.device_count()
    if count == 0:
        return f"this machine has no {parsed.type} device"
    return "" if (parsed.index or 0) < count else f"this machine has {count} {parsed.type} device{'s' * (count != 1)}"
