"""With little memory, device_map="auto" offloads the per-layer embeddings first and keeps decoder layers.

Symptom: ``RuntimeError: Tensor on device meta is not on the expected device``, or a similar error, from a model
loaded with ``device_map="auto"`` and less memory than it needs. If the model is quantized, ``ValueError: Some
modules are dispatched on the CPU or the disk``. Or nothing is raised, and the whole model is on the CPU.

Cause: The map from ``_get_device_map`` assumes that every offloaded module fits on the accelerator beside the rest,
because accelerate copies it there for each forward. The largest leaf therefore sets the smallest budget. In Gemma 4
that leaf is the per-layer embedding weight (4.7 GiB of E2B's 9.5 GiB), although a forward needs only a few of its
rows. When it does not fit, layers that would have fitted are placed on the CPU. The budget has no room for keys and
values or for activations.

Fix: For Gemma 4 models on ``"auto"``, ``"balanced"``, ``"balanced_low_0"`` or ``"sequential"``, the patch uses
upstream's map when it offloads nothing. Otherwise the per-layer embeddings leave the accelerator first, then the
towers, then decoder layers, as few as needed. Offloaded layers are quantized like the others, as upstream does for
these maps. A tower loaded alone and a model with a quantizer other than bitsandbytes always get upstream's map.

``max_memory`` is then the peak while loading and running, for the context length that one warning line names. On the
CPU, all free memory may be used unless ``max_memory`` limits it; what does not fit there is placed on disk. A budget
that cannot work raises one error that names the smallest budget that does.

Remove when: transformers plans for what a model needs to run, leaves room for it, and does not copy a whole
embedding weight to the accelerator.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._engine.text import size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import family
from gemma4_compat._planner import cost, layout
from gemma4_compat._planner.blueprint import describe
from gemma4_compat._quantization import offloaded

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_LOGGER = logging.getLogger("gemma4_compat")
_OFFLOADED = offloaded.OFFLOADED
_CONTEXTS = (4096, 2048, 1024, 512, 256)  # the longest that fits is planned for
_MODALITIES = {"images": "vision", "sound": "audio"}
#: Of free memory nobody has set a limit for. Upstream leaves as much, for the same reason: fragments.
_SHARE = 0.9
#: For the reproduction: its model has per-layer embeddings of 48 MiB, and needs this much to run without them.
_BUDGET = 44 << 20


def get_device_map(
    original: Callable[..., Any],
    model: Any,
    device_map: Any,
    max_memory: Any = None,
    hf_quantizer: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not isinstance(device_map, str) or not _is_planned_for(model, hf_quantizer):
        return original(model, device_map, max_memory, hf_quantizer, *args, **kwargs)
    with _maps_not_refused(hf_quantizer):
        placement = original(model, device_map, max_memory, hf_quantizer, *args, **kwargs)
    if not _offloaded(placement):
        return placement
    budgets, host, disk = _budgets(max_memory)
    if not _offloaded(placement) - set(budgets):
        return placement
    return _plan(model, device_map, budgets, host, disk)


def _offloaded(placement: dict[str, Any]) -> set[str]:
    return set(placement.values()) & _OFFLOADED


def _is_planned_for(model: Any, hf_quantizer: Any) -> bool:
    """Whether the layout knows the model and its quantization; a tower alone is not planned for."""
    return (
        family.is_gemma4(model)
        and not str(model.config.model_type).endswith(("_vision", "_audio"))
        and (hf_quantizer is None or type(hf_quantizer).__name__ in ("Bnb4BitHfQuantizer", "Bnb8BitHfQuantizer"))
    )


@contextlib.contextmanager
def _maps_not_refused(hf_quantizer: Any) -> Iterator[None]:
    """Inside, the quantizer of this load does not refuse a map with offloaded modules.

    Such a map only says that not everything fits on the accelerator; it is not used.
    """
    if hf_quantizer is None:
        yield
        return
    vars(hf_quantizer)["validate_environment"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del vars(hf_quantizer)["validate_environment"]


def _budgets(max_memory: Any) -> tuple[dict[Any, int], int, int | None]:
    """Bytes for each accelerator, for the CPU and for the disk (None: as much as it takes).

    Without an accelerator the CPU takes its place, and offloads to disk, as in upstream's maps.
    """
    from transformers.integrations.accelerate import get_max_memory

    found = get_max_memory(None if max_memory is None else dict(max_memory))
    share = _SHARE if max_memory is None else 1
    budgets = {device: int(size * share) for device, size in found.items() if device not in _OFFLOADED and size > 0}
    disk = found.get("disk")
    if not budgets:
        return {"cpu": int(found["cpu"])}, 0, disk
    host = found["cpu"] if "cpu" in found else get_max_memory(None).get("cpu", 0)
    return budgets, int(host), disk


def _plan(model: Any, strategy: str, budgets: dict[Any, int], host: int, disk: int | None) -> dict[str, Any]:
    blueprint = describe(model)
    for load in _loads(model, blueprint):
        try:
            placed = layout.layout(
                blueprint, budgets, load, cpu=host, disk=disk, balanced=strategy in ("auto", "balanced")
            )
            break
        except Gemma4CompatError as error:  # the last load needs the least, so its error is the one to raise
            problem = error
    else:
        raise problem
    given = " and ".join(f"{size_text(size)} on {device}" for device, size in budgets.items())
    kinds = ["text", *(name for name, attribute in _MODALITIES.items() if getattr(load, attribute))]
    _LOGGER.warning(
        "gemma4_compat: device_map=%r: %s is less than the model needs; kept elsewhere: %s; room for %d tokens of "
        "context (%s)",
        strategy,
        given,
        ", ".join(_left(placed)),
        load.context,
        ", ".join(kinds),
    )
    return dict(placed.device_map)


def _left(placed: Any) -> list[str]:
    """Modules that are not on an accelerator."""
    return offloaded.compact(name for name, device in placed.device_map.items() if device not in placed.use)


def _loads(model: Any, blueprint: Any) -> Iterator[Any]:
    """What to plan for, the most first: the longest context, with every modality of the model."""
    attention = "eager" if getattr(model.config, "_attn_implementation", None) == "eager" else "sdpa"
    modalities = {name: getattr(blueprint, name) is not None for name in _MODALITIES.values()}
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _CONTEXTS[0]
    contexts = dict.fromkeys(min(context, longest) for context in _CONTEXTS)
    for context in contexts:
        yield cost.Load(context=context, attention=attention, **modalities)
    if any(modalities.values()):
        for context in contexts:
            yield cost.Load(context=context, attention=attention)


def reproduce(workspace: Workspace) -> Outcome:
    import tempfile

    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.workspace import difference

    workspace.needs("per_layer_embeddings")
    checkpoint = workspace.larger(per_layer_vocabulary=1 << 16)
    found = []
    for quantization in (None, "4bit-double"):
        reference = tiny.load(checkpoint, quantization, device=workspace.main)
        model = tiny.load(
            checkpoint,
            quantization,
            device_map="auto",
            max_memory={workspace.main: _BUDGET},
            offload_folder=tempfile.mkdtemp(dir=workspace.folder),
        )
        found.append(difference(workspace.outputs(reference), workspace.outputs(model)))
        count = len(model.model.language_model.layers)
        layers = {str(model.hf_device_map.get(f"model.language_model.layers.{index}")) for index in range(count)}
        if layers != {str(workspace.main)}:
            where = ", ".join(sorted(layers))
            return Outcome(True, f"decoder layers are on {where}; all fit on {workspace.main}")
    return Outcome.of_parity(max(found), "device_map='auto' with room for all but the per-layer embeddings")


PATCH = Patch(
    id="transformers-auto-map",
    severity=Severity.CRASH,
    failure_points=("F17",),
    distribution="transformers",
    affected=">=5.5",
    requires=("accelerate",),
    needs=(
        "accelerate-embedding-lookup",
        "transformers-quantize-offloaded",
    ),
    targets=(
        Target(module="transformers.integrations.accelerate", name="_get_device_map", replacement=get_device_map),
    ),
    reproduce=reproduce,
)
