"""The first child: what machine this is, what the model is, and which placements to check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._doctor.check import machine, placements, prompts
from gemma4_compat._engine.io import shadowed

Say = Callable[[dict[str, Any]], None]


def run(order: dict[str, Any], say: Say) -> None:
    """Say ``machine``, ``model``, ``adapter``, ``placements`` and what they share.

    Args:
        order: ``folder`` (None: the tiny model is written into ``work``), ``work``, ``adapter``, ``vram``,
            ``context``, ``quantize``, ``quick``.
        say: takes each result.

    Raises:
        Gemma4CompatError: the model or the adapter cannot be read, or nothing fits.
    """
    shadowed.refuse("torch", "transformers")
    say({"step": "machine"})
    described = machine.describe()
    if order["folder"] is None:
        say({"step": "tiny model"})
        order |= _tiny(Path(order["work"]), adapter=order["adapter"] is None)
    say({"step": "model"})
    model, facts = _model(order["folder"])
    context = min(order["context"], int(model.config.get_text_config().max_position_embeddings))
    planned_for, whole, note = placements.budget(order["vram"], described["gpu"])
    kinds = prompts.kinds(model.config)
    media = bool({"image", "sound"} & set(kinds))
    options = {
        "context": context,
        "quantize": order["quantize"],
        "vision": "image" in kinds,
        "audio": "sound" in kinds,
        "adapter": order["adapter"],
        "prefill_chunk": None if media else context,  # a check reads its prompts at once
    }
    say({"step": "plan"})
    found = placements.propose(order["folder"], planned_for, whole, count=2 if order["quick"] else 4, options=options)
    facts |= {"quantization": found[0]["quantization"], "quantized_experts": found[0]["quantize_experts"]}
    say({"step": "speed of copies"})
    described["copies"] = machine.speeds()
    adapter = None if order["adapter"] is None else _adapter(order["adapter"], order["folder"], found[0])
    say(
        {
            "surveyed": {
                "machine": described,
                "patches": machine.patches(),
                "model": facts,
                "adapter": adapter,
                "budget": None if described["gpu"] is None else planned_for,
                "note": note,
                "context": context,
                "kinds": kinds,
                "placements": found,
                "folder": order["folder"],
                "adapter_folder": order["adapter"],
            }
        }
    )


def _tiny(work: Path, *, adapter: bool) -> dict[str, Any]:
    """The tiny model, and an adapter for all of its parts if there is no other."""
    from gemma4_compat._lab import tiny_adapters, tiny_models

    folder = work / "tiny"
    tiny_models.build_checkpoint(folder)
    found: dict[str, Any] = {"folder": str(folder)}
    if adapter:
        found["adapter"] = str(tiny_adapters.build_adapter(folder, work / "tiny-adapter", "all"))
    return found


def _model(folder: str) -> tuple[Any, dict[str, Any]]:
    """The model on meta, and its facts: none of them is a name or a path."""
    from gemma4_compat._gemma4.models import build

    model = build.on_meta(folder)[0]
    text = model.config.get_text_config()
    facts = {
        "model_class": type(model).__name__,
        "variant": _variant(text),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": text.num_hidden_layers,
        "hidden": text.hidden_size,
        "vocabulary": text.vocab_size,
        "stored_quantized": getattr(model.config, "quantization_config", None) is not None,
    }
    return model, facts


def _variant(text: Any) -> str | None:
    """The released variant whose text model has this size; None for another."""
    from gemma4_compat._gemma4.models import variants

    for name in variants.NAMES:
        shape = variants.shape(name)
        sizes = {key: shape["text"][key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
        sizes["num_hidden_layers"] = len(shape["layer_types"])
        if all(getattr(text, key, None) == value for key, value in sizes.items()):
            return name
    return None


def _adapter(adapter: str, base: str, placement: dict[str, Any]) -> dict[str, Any]:
    """What a scan of the adapter says; ``problems`` are for the screen."""
    from gemma4_compat._adapter_tools.scan.job import scan_adapter

    found = scan_adapter(adapter, base, quantize=placement["quantization"])
    return {
        "type": found.peft_type,
        "ranks": sorted(found.ranks),
        "keys": sum(found.keys.values()),
        "problems": [{"id": item.id, "message": item.message} for item in found.problems],
    }
