"""The placements of a check: everything on the card where it fits, what ``plan`` proposes, and some that need less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gemma4_compat._engine.io.text import parse_size, size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._plan.cards.measured import away, title
from gemma4_compat._plan.plan import plan_device_map
from gemma4_compat._plan.result import Plan

#: Smaller budgets that are tried for further placements, as shares of what the proposed one uses.
_SHARES = (0.9, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2)
#: Bytes of a card's free memory that are left to other programs.
_LEFT = 1 << 29
#: The budget where there is no card to fill: more than any model needs.
_UNBOUNDED = 1 << 40


def budget(vram: str | None, gpu: Mapping[str, Any] | None) -> tuple[int, int, str]:
    """What to plan for, what "everything on the card" may take, and a note if other programs hold a part of the card.

    Args:
        vram: as given; None: what is free.
        gpu: from :func:`machine.describe`.

    Raises:
        Gemma4CompatError: it is not a size, or more than the card has.
    """
    asked = None if vram is None else parse_size(vram)
    if gpu is None:
        return asked or _UNBOUNDED, _UNBOUNDED, ""
    free, total = gpu["free"] - _LEFT, gpu["memory"]
    if asked is not None and asked > total:
        raise Gemma4CompatError(
            f"--vram {vram} is more than this card has, {size_text(total)}; leave it out, or give less"
        )
    taken = f"other programs hold {size_text(total - gpu['free'])} of the card's {size_text(total)}"
    if free <= 0:
        raise Gemma4CompatError(f"{taken}, and nothing is left to check with; end them (nvidia-smi lists them)")
    if asked is not None and asked > free:
        return free, free, f"{taken}: checked with {size_text(free)}, not {vram}"
    filled = asked is None and total - gpu["free"] > total // 4
    return asked or free, free, f"{taken}: checked with what is free" if filled else ""


def propose(
    model: str, planned_for: int, whole: int, *, count: int, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Up to ``count`` placements, the one that is on the card as a whole first; each is data for :mod:`case`.

    Args:
        model: a checkpoint's folder.
        planned_for: bytes, as ``plan --vram``.
        whole: bytes that everything on the card may take.
        count: of placements.
        options: further arguments of ``plan_device_map``.

    Raises:
        Gemma4CompatError: nothing fits into ``planned_for``.
    """
    proposed = plan_device_map(model, planned_for, **options)
    plans = [proposed]
    if proposed.layout.offloads and (everything := _fitting(model, whole, options)) and not everything.layout.offloads:
        plans.insert(0, everything)
    for share in _SHARES:
        smaller = _fitting(model, int(share * proposed.use[0].peak), options)
        if smaller is None or len(plans) >= count:
            break
        if away(smaller.device_map) not in [away(plan.device_map) for plan in plans]:
            plans.append(smaller)
    found = [_placement(plan, plan.device_map, planned=True) for plan in plans]
    for device_map in _by_hand(proposed.device_map):
        if len(found) < min(count, 3) and away(device_map) not in [item["away"] for item in found]:
            found.append(_placement(proposed, device_map, planned=False))
    return found[:count]


def _fitting(model: str, nbytes: int, options: Mapping[str, Any]) -> Plan | None:
    try:
        return plan_device_map(model, nbytes, **options)
    except Gemma4CompatError:  # it does not fit: this is not one of the placements
        return None


def _by_hand(device_map: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Maps with towers and per-layer embeddings in host memory, then also every other layer: for models so small that
    every plan keeps them whole.
    """
    first = {
        name: "cpu" if name.endswith(("_tower", "embed_tokens_per_layer")) else device
        for name, device in device_map.items()
    }
    yield first
    layers = [name for name in device_map if ".layers." in name]
    yield first | dict.fromkeys([*layers[::2], *layers[-1:]], "cpu")


def _placement(plan: Plan, device_map: Mapping[str, Any], *, planned: bool) -> dict[str, Any]:
    use = next(iter(plan.use.values()))
    return {
        "title": title(away(device_map)),
        "away": away(device_map),
        "planned": {name: getattr(use, name) for name in ("loading", "prefill", "decode")} if planned else None,
        "expects_replay": plan.fast,
        "model_class": plan.model_class,
        "device_map": dict(device_map),
        "quantization": plan.quantization,
        "skip": list(plan.source.skip),
        "quantize_experts": plan.experts is not None and not plan.source.stored_experts,
    }
