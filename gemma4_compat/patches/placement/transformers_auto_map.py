"""With little memory, device_map="auto" offloads the per-layer embeddings first and keeps decoder layers.

Symptom: ``RuntimeError: Tensor on device meta is not on the expected device``, or a similar error, from a model loaded
with ``device_map="auto"`` and less memory than it needs. If the model is quantized, ``ValueError: Some modules are
dispatched on the CPU or the disk``. Or nothing is raised, and the whole model is on the CPU.

Cause: The map from ``_get_device_map`` assumes that every offloaded module fits on the accelerator beside the rest,
because accelerate copies it there for each forward. The largest leaf therefore sets the smallest budget. In Gemma 4
that leaf is the per-layer embedding weight (4.7 GiB of E2B's 9.5 GiB), although a forward needs only a few of its
rows. When it does not fit, layers that would have fitted are placed on the CPU. The budget has no room for keys and
values or for activations.

Fix: For Gemma 4 models on ``"auto"``, ``"balanced"``, ``"balanced_low_0"`` or ``"sequential"``, the patch uses
upstream's map if it offloads nothing. Otherwise the per-layer embeddings leave the accelerator first, then the towers,
then the experts of as few decoder layers as needed, then as few decoder layers as needed. Offloaded layers are
quantized like the others, as upstream does for these maps. A tower loaded on its own and a model with a quantizer
other than bitsandbytes always get upstream's map.

``max_memory`` is then the peak while loading and running, for the context length that one warning line names. If the
budget is too small for that, it is filled with only weights, as upstream does, and the line says so. On the CPU, all
free memory may be used unless ``max_memory`` limits it; the rest goes to disk. A budget for which there is no plan
gets upstream's map and one line with the smallest budget that works; if upstream also refuses its map, that line is
the error.

Remove when: transformers plans for what a model needs to run, leaves room for it, and does not copy a whole
embedding weight to the accelerator.
"""

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.io.text import size_text
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import offloaded
from gemma4_compat._memory import formulas, layout
from gemma4_compat._memory.blueprint import describe
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F17 F50",
    severity="crash",
    affected=">=5.5",
    requires="accelerate",
    needs="accelerate-embedding-lookup transformers-quantize-offloaded",
)

_LOGGER = logging.getLogger("gemma4_compat")
_OFFLOADED = offloaded.OFFLOADED
_CONTEXTS = (4096, 2048, 1024, 512, 256)  # the longest that fits is planned for
_MODALITIES = {"images": "vision", "sound": "audio"}
#: Share of free memory without a user's limit that is used. Upstream leaves as much, for fragmentation.
_SHARE = 0.9
_MIB = 1 << 20
#: For the reproduction, whose model has per-layer embeddings of 24 MiB and fits into this without them.
_BUDGET = 22 << 20


@PATCH.replaces("transformers.integrations.accelerate", "_get_device_map")
def get_device_map(
    original: Original,
    model: Any,
    device_map: Any,
    max_memory: Any = None,
    hf_quantizer: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not isinstance(device_map, str) or not family.has_parts(model):
        return original(model, device_map, max_memory, hf_quantizer, *args, **kwargs)
    if not _is_planned_for(model, hf_quantizer):
        upstream = original(model, device_map, max_memory, hf_quantizer, *args, **kwargs)
        return device_maps.with_buffers(model, upstream)
    with _maps_not_refused(hf_quantizer):
        upstream = original(model, device_map, max_memory, hf_quantizer, *args, **kwargs)
    upstream = device_maps.with_buffers(model, upstream)
    budgets, host, disk = _budgets(max_memory)
    if not _offloaded(upstream) - set(budgets):
        return upstream
    placement, text = _plan(model, budgets, host, disk, balanced=device_map in ("auto", "balanced"))
    if placement is None:
        problem = f"device_map={device_map!r}: {text}"
        _check_not_refused(hf_quantizer, upstream, problem)
        text = f"{text}. Upstream's map is used instead; kept elsewhere: {', '.join(_left(upstream, budgets))}"
    _LOGGER.warning("gemma4_compat: device_map=%r: %s", device_map, text)
    return upstream if placement is None else placement


def _offloaded(placement: dict[str, Any]) -> set[str]:
    return set(placement.values()) & _OFFLOADED


def _is_planned_for(model: Any, hf_quantizer: Any) -> bool:
    """Whether the layout supports the model and its quantization; there is no plan for a tower on its own."""
    return (
        family.is_gemma4(model)
        and not str(model.config.model_type).endswith(("_vision", "_audio"))
        and (hf_quantizer is None or type(hf_quantizer).__name__ in ("Bnb4BitHfQuantizer", "Bnb8BitHfQuantizer"))
    )


def _maps_not_refused(hf_quantizer: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, the quantizer of this load does not refuse a map with offloaded modules.

    Such a map only shows that not everything fits on the accelerator; it is not used.
    """
    if hf_quantizer is None:
        return contextlib.nullcontext()
    return in_place.replaced(hf_quantizer, "validate_environment", lambda *_args, **_kwargs: None)


def _check_not_refused(hf_quantizer: Any, placement: dict[str, Any], problem: str) -> None:
    """Raise ``problem`` if upstream refuses this map, or loads it but cannot run it."""
    if set(placement.values()) == {"disk"} and versions.admits("<5.13", versions.current("transformers") or ""):
        raise Gemma4CompatError(problem)
    if hf_quantizer is None:
        return
    try:
        hf_quantizer.validate_environment(device_map=placement)
    except ValueError as error:  # "Some modules are dispatched on the CPU or the disk"
        raise Gemma4CompatError(problem) from error


def _budgets(max_memory: Any) -> tuple[dict[Any, int], int, int | None]:
    """Bytes for each accelerator, for the CPU and for the disk (None: unlimited).

    Without an accelerator the CPU takes its place and offloads to disk, as in upstream's maps.
    """
    from transformers.integrations.accelerate import get_max_memory

    found = get_max_memory(None if max_memory is None else dict(max_memory))
    share = _SHARE if max_memory is None else 1
    budgets = {device: int(size * share) for device, size in found.items() if device not in _OFFLOADED and size > 0}
    disk = found.get("disk")
    if not budgets:
        return {"cpu": int(found.get("cpu", 0))}, 0, disk
    host = found["cpu"] if "cpu" in found else get_max_memory(None).get("cpu", 0)
    return budgets, int(host), disk


def _plan(
    model: Any, budgets: dict[Any, int], host: int, disk: int | None, *, balanced: bool
) -> tuple[dict[str, Any] | None, str]:
    """A map and the line that describes it; or None and the reason."""
    given = " and ".join(f"{_size(size)} on {device}" for device, size in budgets.items())
    try:
        blueprint = describe(model)
    except Gemma4CompatError as error:  # a class without a language model
        return None, str(error)
    loads = list(_loads(model, blueprint))
    placed = None
    for load in loads if all(budgets.values()) else ():
        with contextlib.suppress(Gemma4CompatError):  # does not fit; the next load needs less
            placed = layout.layout(blueprint, budgets, load, cpu=host, balanced=balanced)
            break
    if placed is None:
        needed = layout.smallest_budget(blueprint, loads[-1])
        working = next(load for load in reversed(loads) if not load.weights_only)
        return None, (
            f"{blueprint.model_class} does not fit into {given}, even with everything offloaded that can be: its "
            f"weights alone need {_size(needed, up=True)} on one accelerator, and "
            f"{_size(layout.smallest_budget(blueprint, working), up=True)} with room for {working.context} tokens of "
            "context"
        )
    kinds = ", ".join(["text", *(name for name, attribute in _MODALITIES.items() if getattr(load, attribute))])
    room = f"room for {load.context} tokens of context ({kinds})"
    if load.weights_only:
        least = layout.smallest_budget(blueprint, replace(load, weights_only=False))
        room = f"room for only the weights; {room} would need {_size(least, up=True)} on one accelerator"
    left = ", ".join(_left(placed.device_map, placed.use))
    over = (
        "" if disk is None or placed.disk <= disk else f"; {_size(placed.disk)} are on disk, more than {_size(disk)}"
    )
    return dict(placed.device_map), f"{given} is less than the model needs; kept elsewhere: {left}; {room}{over}"


def _size(nbytes: int, *, up: bool = False) -> str:
    return size_text(nbytes, up=up) if nbytes >= _MIB else f"{-(-nbytes // 1024) if up else round(nbytes / 1024)} KiB"


def _left(placement: Mapping[str, Any], accelerators: Collection[Any]) -> list[str]:
    """Modules that are not on an accelerator."""
    names = offloaded.compact(name for name, device in placement.items() if device not in accelerators)
    return [name or "the whole model" for name in names]


def _loads(model: Any, blueprint: Any) -> Iterator[Any]:
    """What to plan for, from most to least: the longest context with every modality first, only the weights last."""
    attention = "eager" if getattr(model.config, "_attn_implementation", None) == "eager" else "sdpa"
    modalities = {name: getattr(blueprint, name) is not None for name in _MODALITIES.values()}
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _CONTEXTS[0]
    contexts = dict.fromkeys(min(context, longest) for context in _CONTEXTS)
    for context in contexts:
        yield formulas.Load(context=context, attention=attention, **modalities)
    if any(modalities.values()):
        for context in contexts:
            yield formulas.Load(context=context, attention=attention)
    shortest = min(contexts)
    yield formulas.Load(context=shortest, attention=attention, **modalities, weights_only=True)
    yield formulas.Load(context=shortest, attention=attention, weights_only=True)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    workspace.needs("per_layer_embeddings")
    checkpoint = workspace.larger(per_layer_vocabulary=1 << 15)
    found = []
    for quantization in (None, "4bit-double"):
        reference = tiny.load(checkpoint, quantization, device=workspace.main)
        model = tiny.load(
            checkpoint,
            quantization,
            device_map="auto",
            max_memory={workspace.main: _BUDGET},
            offload_folder=workspace.new_folder(),
        )
        found.append(workspace.difference(workspace.outputs(reference), model))
        count = len(model.model.language_model.layers)
        layers = {str(model.hf_device_map.get(f"model.language_model.layers.{index}")) for index in range(count)}
        if layers != {str(workspace.main)}:
            where = ", ".join(sorted(layers))
            return Outcome(True, f"decoder layers are on {where}; all fit on {workspace.main}")
    return Outcome.of_parity(max(found), "device_map='auto' with room for all but the per-layer embeddings")
