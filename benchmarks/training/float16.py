"""What overflows in float16, at which magnitude, and does training in it keep float32's loss?

python benchmarks/training/float16.py [--json FILE] [--parts sweep,widths,trained,training,rows]

On the CPU, which like a GPU rounds the output of a float16 matrix product and sums in float32. No weights are
downloaded: random weights are rescaled to the magnitudes of trained ones (magnitudes.py).

- sweep: of every variant, tiny, and every rescaling: the first power of two at which float16 (weights in float16, or
  bfloat16 weights under float16 autocast) overflows, in which operation, and how large that is in float32.
- widths: text layers of the released widths, gate and up scaled until their product is beyond float16: the largest
  value that any module returns is then the largest that forward hooks would have reported.
- trained: the same maxima of the tiny trained models, and float16's errors.
- training: fifty steps of LoRA on them.
- rows: a repair that was tried (float16_rows.py): bits where nothing overflows, limits, errors, operations.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.training import float16_rows

LARGEST = 65504.0
#: A sweep ends here: the weights themselves leave float16 soon after.
LAST_POWER = 22
#: How much worse than unscaled counts as a loss.
LOSS = 10.0
WAYS = ("float16", "autocast")
STEPS = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too; parts that are not run stay")
    parser.add_argument("--parts", default="sweep,widths,trained,training,rows")
    arguments = parser.parse_args()
    import gemma4_compat  # noqa: F401 - before upstream

    parts: dict[str, Callable[[], Any]] = {"sweep": sweep, "widths": widths, "trained": trained, "training": training}
    parts["rows"] = lambda: float16_rows.measured(_limit)
    result: dict[str, Any] = {}
    if arguments.json and arguments.json.exists():
        result = json.loads(arguments.json.read_text(encoding="utf-8"))
    result |= {"torch": version("torch"), "transformers": version("transformers"), "peft": version("peft")}
    for part in arguments.parts.split(","):
        result[part] = parts[part]()
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(_text(result) + "\n", encoding="utf-8")
    print(_text(result))
    return 0


def _text(result: Any) -> str:
    """JSON has no infinities: null stands for what is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, list):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(result), indent=1, allow_nan=False)


def sweep() -> list[dict[str, Any]]:
    """E4B is left out: it is built like E2B."""
    from benchmarks.training import magnitudes
    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny, tiny_models

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in (name for name in variants.NAMES if name != "E4B"):
            checkpoint = tiny_models.build_checkpoint(Path(folder) / variant, variant=variant)
            batch = tiny.inputs(variant=variant)
            plain = tiny.load(checkpoint).float()
            for name in magnitudes.SAME_FUNCTION | magnitudes.OTHER_FUNCTION:
                if magnitudes.applies(name, plain):
                    given = batch if name.startswith("audio") else tiny.without(batch, "input_features")
                    rows += [{"variant": variant, "scaled": name} | _limit(plain, given, name, way) for way in WAYS]
    return rows


def _limit(plain: Any, batch: dict[str, Any], name: str, way: str) -> dict[str, Any]:
    """The first power of two at which the logits are not finite, or :data:`LOSS` times worse than unscaled."""
    from benchmarks.training import magnitudes

    unscaled = _error(plain, batch, name, 0, way)
    fine, bad = 0, LAST_POWER + 1
    while bad - fine > 1:
        power = (fine + bad) // 2
        if _error(plain, batch, name, power, way) <= LOSS * unscaled:
            fine = power
        else:
            bad = power
    model, around = _model(plain, name, 2.0**fine, way)
    with magnitudes.watch(model.float()) as seen:
        _logits(model, batch, nullcontext)
    row = {"way": way, "error": unscaled, "finite_to": fine, "largest_output": seen.largest_output}
    row["error_there"] = _error(plain, batch, name, fine, way)
    row["gradients"] = _largest_loss_scale(plain, batch, name, 2.0**fine, way)
    if bad > LAST_POWER:
        return row
    model, around = _model(plain, name, 2.0**bad, way)
    with magnitudes.watch(model) as half:
        _logits(model, batch, around)
    with magnitudes.watch(model.float()) as single:
        _logits(model, batch, nullcontext)
    row |= {"power": bad, "first": half.first, "first_module": half.first_module}
    return row | {"there": single.largest.get(half.first or ""), "worse": _error(plain, batch, name, bad, way)}


def _error(plain: Any, batch: dict[str, Any], name: str, power: int, way: str) -> float:
    """Of the logits, relative to float32's with the same weights; nan if one of them is not finite."""
    model, around = _model(plain, name, 2.0**power, way)
    found = _logits(model, batch, around)
    return _relative(found, _logits(model.float(), batch, nullcontext))


def _logits(model: Any, batch: dict[str, Any], around: Callable[[], AbstractContextManager[Any]]) -> Any:
    import torch

    with torch.no_grad(), around():
        return model(**batch).logits


def _model(plain: Any, name: str, factor: float, way: str) -> tuple[Any, Callable[[], AbstractContextManager[Any]]]:
    """A copy scaled in float32, in float16 or (for autocast) bfloat16, and what it runs in."""
    from benchmarks.training import magnitudes

    model = magnitudes.rescale(copy.deepcopy(plain), name, factor)
    return _cast(model, name.startswith("audio") or not hasattr(model.model, "vision_tower"), way), _around(way)


def _cast(model: Any, layer_norms: bool, way: str) -> Any:
    """The dtype of the weights. With layer norms (sound, and images of the 12B) autocast gets float32: on a CPU,
    unlike on a GPU, it gives them float16 inputs and bfloat16 weights, which PyTorch refuses.
    """
    import torch

    if way == "float16":
        return model.to(torch.float16)
    return model.to(torch.float32 if layer_norms and way == "autocast" else torch.bfloat16)


def _around(way: str) -> Callable[[], AbstractContextManager[Any]]:
    import torch

    return (lambda: torch.autocast("cpu", torch.float16)) if way == "autocast" else nullcontext


def _relative(found: Any, expected: Any) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def _largest_loss_scale(plain: Any, batch: dict[str, Any], name: str, factor: float, way: str) -> dict[str, Any]:
    """The largest power of two by which the loss may be scaled, and the error of LoRA's gradients there."""
    import torch

    model, around = _model(plain, name, factor, way)
    model = _adapted(model)
    fine, bad = -1, 25
    kept: Any = None
    while bad - fine > 1:
        power = (fine + bad) // 2
        gradients = _gradients(model, batch, around, 2.0**power)
        if all(one.isfinite().all() for one in gradients):
            fine, kept = power, gradients
        else:
            bad = power
    if kept is None:
        return {"loss_scale_power": None, "error": None}
    expected = _gradients(model.float(), batch, nullcontext, 1.0)
    return {"loss_scale_power": fine, "error": _relative(torch.cat(kept), torch.cat(expected))}


def _adapted(model: Any) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|o_proj|gate_proj|up_proj|down_proj)")
    return get_peft_model(model, config)


def _gradients(model: Any, batch: dict[str, Any], around: Any, scale: float) -> list[Any]:
    """Those of the adapter, unscaled, each flat in float32."""
    model.zero_grad()
    with around():
        loss = model(**batch, labels=batch["input_ids"]).loss
    (loss.float() * scale).backward()
    return [one.grad.float().flatten() / scale for one in model.parameters() if one.grad is not None]


def widths() -> list[dict[str, Any]]:
    """Layers of the released widths with random weights; gate and up alike, so that their product is at the limit."""
    import torch
    import transformers

    from benchmarks.training import magnitudes
    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import tiny_configs

    rows = []
    for variant in ("E2B", "E4B", "12B"):
        shape = variants.shape(variant)["text"]
        text = {**tiny_configs.text_shape(3), "num_kv_shared_layers": 0, "num_hidden_layers": 1}
        text |= {"layer_types": ["full_attention"], "hidden_size_per_layer_input": 0}
        text |= {"hidden_size": shape["hidden_size"], "intermediate_size": shape["intermediate_size"]}
        torch.manual_seed(0)
        model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**text)).eval()
        batch = {"input_ids": torch.randint(3, 240, (1, 8))}
        (layer,) = model.model.layers
        with torch.no_grad(), magnitudes.watch(model) as seen:
            model(**batch)
            factor = math.sqrt(LARGEST / _product(seen))
            # gelu is about linear for what is large, so twice is near enough
            for _ in range(2):
                layer.mlp.gate_proj.weight.mul_(factor)
                layer.mlp.up_proj.weight.mul_(factor)
                with magnitudes.watch(model) as seen:
                    model(**batch)
                factor = math.sqrt(LARGEST / _product(seen))
            layer.mlp.down_proj.weight.div_(LARGEST)  # so that its output is not the largest
            with magnitudes.watch(model) as seen:
                model(**batch)
        row = {"variant": variant, "hidden": text["hidden_size"], "intermediate": text["intermediate_size"]}
        row |= {"product": _product(seen), "largest_output": seen.largest_output}
        with torch.no_grad():
            layer.mlp.up_proj.weight.mul_(1.05)
            with magnitudes.watch(model.half()) as half:
                logits = model(**batch).logits
        row |= {"first": half.first, "first_module": half.first_module, "logits_finite": bool(logits.isfinite().all())}
        rows.append(row)
    return rows


def _product(seen: Any) -> float:
    """The largest product of gate and up."""
    return max(value for where, value in seen.largest.items() if where.endswith(".mlp: mul"))


def _trained() -> Iterator[tuple[str, Any]]:
    from gemma4_compat._lab.trained import TWINS, Trained

    yield "E2B", Trained.find()
    root = Path(__file__).resolve().parents[2]
    for kind, place in TWINS.items():
        yield kind, Trained(root / place)


def trained() -> list[dict[str, Any]]:
    import torch

    from benchmarks.training import magnitudes

    rows = []
    for kind, one in _trained():
        for what, shown in _examples(one).items():
            batch = one.prompt("What do you see, and how many legs does a fox have?", **shown)
            expected = one.load(dtype=torch.float32)
            with torch.no_grad(), magnitudes.watch(expected) as seen:
                reference = expected(**batch).logits
            row: dict[str, Any] = {"model": kind, "input": what, "largest_output": seen.largest_output}
            row["product"] = _product(seen)
            row["largest"] = max((value, where) for where, value in seen.largest.items() if _is_activation(value))
            for way in (*WAYS, "bfloat16"):
                model = _cast(one.load(dtype=torch.float32), what == "sound" or (kind, what) == ("12B", "image"), way)
                with torch.no_grad(), _around(way)():
                    row[way] = _relative(model(**batch).logits, reference)
            rows.append(row)
    return rows


def _is_activation(value: float) -> bool:
    return value < 1e30  # masks have the largest float


def _examples(one: Any) -> dict[str, dict[str, str]]:
    """What the model can be shown: names of its first picture and sound."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(one.checkpoint))
    examples = one.folder if (one.folder / "pictures").exists() else one.folder.parent / "trained_model"
    found: dict[str, dict[str, str]] = {"text": {}}
    found["image"] = {"picture": sorted((examples / "pictures").iterdir())[0].stem}
    if config.audio_config is not None:
        found["sound"] = {"sound": sorted((examples / "sounds").iterdir())[0].stem}
    return found


def training() -> list[dict[str, Any]]:
    """Fifty steps of LoRA: the loss of each way against float32's, from the same start."""
    rows = []
    for kind, one in _trained():
        reference = _losses(one, "float32")
        for way in ("float16", "autocast", "bfloat16"):
            run = _losses(one, way)
            pairs = zip(run["loss"], reference["loss"], strict=True)
            rows.append(
                {
                    "model": kind,
                    "way": way,
                    "first_loss": reference["loss"][0],
                    "last_loss": run["loss"][-1],
                    "last_float32": reference["loss"][-1],
                    "largest_difference": max(abs(found - expected) for found, expected in pairs),
                    "skipped": run["skipped"],
                    "loss_scale": run["scale"],
                    "vanished": run["vanished"],
                }
            )
    return rows


def _losses(one: Any, way: str) -> dict[str, Any]:
    """Train as ``Trainer(fp16=True)`` does: autocast, a ``GradScaler``, an adapter in float32.

    ``float16``: the base is in float16; ``autocast``: in bfloat16. Without a scaler: ``float32``, ``bfloat16``.
    """
    import torch

    half = way in WAYS
    dtype = {"float16": torch.float16, "float32": torch.float32}.get(way, torch.bfloat16)
    model = _adapted(one.load(dtype=dtype)).train()
    said = ("How many legs does a fox have?", "A fox has four legs, and so does a wolf.", "And a mole?")
    batch = one.prompt(*said)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    around = torch.autocast("cpu", torch.float16 if half else torch.bfloat16, enabled=way != "float32")
    losses, skipped, vanished, counted = [], 0, 0, 0
    for _ in range(STEPS):
        with around:
            loss = model(**batch, labels=batch["input_ids"]).loss
        scaler.scale(loss).backward()
        vanished += sum(int((weight.grad == 0).sum()) for name, weight in _second(model))
        counted += sum(weight.numel() for name, weight in _second(model))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += half and scaler.get_scale() < before
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": losses, "skipped": skipped, "scale": scaler.get_scale(), "vanished": vanished / counted}


def _second(model: Any) -> list[tuple[str, Any]]:
    """LoRA's second matrices: the first have no gradient in the first step."""
    return [(name, weight) for name, weight in model.named_parameters() if "lora_B" in name]


if __name__ == "__main__":
    raise SystemExit(main())
