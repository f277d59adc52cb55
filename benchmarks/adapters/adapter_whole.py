"""How long does an adapter load onto a base that is whole on one device, with the shim and with upstream as it is?

python benchmarks/adapters/adapter_whole.py --shape E2B,E4B,12B --out FILE.json [--minutes N] [--rounds N]

Random weights in bf16 and the real shape, but for the vocabulary, which is small; a rank-16 LoRA adapter on every
linear of the language model. Two processes, one with the shim, have the base and take turns: each loads the adapter,
by ``PeftModel.from_pretrained`` or by ``model.load_adapter``, and takes it off. The first load of each kind is
reported apart. The times are of the wall and of the CPU. What a load leaves is compared between the two processes: the
adapter's weights by a checksum, and the state of torch's generators.

Exit code 1: a load raised, or the two processes did not leave the same.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.small_card import device as small_card_device
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny_configs

SHAPES = ("E2B", "E4B", "12B", "tiny")
HOW = ("peft", "transformers")
SIDES = {"ours": True, "upstream": False}
GOAL = 0.5
RANK = 16

_models: dict[str, Any] = {}


def _config(shape: str) -> Any:
    if shape == "tiny":
        return tiny_configs.config()
    config = variants.config(shape)
    config.text_config.vocab_size = 1024
    if hasattr(config.text_config, "vocab_size_per_layer_input"):
        config.text_config.vocab_size_per_layer_input = 1024
    return config


def _model(shape: str, device: str) -> Any:
    import torch
    import transformers

    config = _config(shape)
    kind = "Gemma4UnifiedForConditionalGeneration" if shape == variants.UNIFIED else "Gemma4ForConditionalGeneration"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(transformers, kind)(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


# In a worker


def build(order: Order) -> Data:
    """The adapter's files."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    folder = Path(order["folder"]) / order["shape"]
    folder.mkdir()
    weights, names = {}, []
    for name, module in _model(order["shape"], "meta").named_modules():
        if ".language_model." in name and isinstance(module, torch.nn.Linear):
            names.append(name)
            for part, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                weights[f"base_model.model.{name}.lora_{part}.weight"] = 0.02 * torch.randn(shape)
    save_file(weights, folder / "adapter_model.safetensors")
    LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names, inference_mode=True).save_pretrained(str(folder))
    return {
        "layers": len(names),
        "adapter_mib": sum(value.nbytes for value in weights.values()) / 2**20,
        "machine": small_card_device.machine(),
    }


def load(order: Order) -> Data:
    """Load the adapter, say what that took and left, and take it off."""
    import torch
    from peft import PeftModel

    shape, folder = order["shape"], str(Path(order["folder"]) / order["shape"])
    if shape not in _models:
        _models.clear()
        small_card_device.forget_peak()
        _models[shape] = _model(shape, small_card_device.main_device())
    model = _models[shape]
    torch.manual_seed(7)
    gc.collect()
    gc.disable()
    small_card_device.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        if order["how"] == "peft":
            PeftModel.from_pretrained(model, folder)
        else:
            model.load_adapter(folder)
        small_card_device.synchronize()
        found: Data = {"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    finally:
        gc.enable()
    states = [torch.get_rng_state(), *(state.cpu() for state in _cuda_states())]
    found["random_state"] = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()[:16]
    total = hashlib.sha256()
    for name, value in model.named_parameters():
        if "lora_" in name:
            said = f"{name} {value.dtype} {value.device} {value.requires_grad}"
            total.update(said.encode() + value.detach().float().cpu().numpy().tobytes())
    found["left"] = total.hexdigest()[:16]
    _take_off(model)
    return found


def _cuda_states() -> list[Any]:
    import torch

    return list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else []


def _take_off(model: Any) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "base_layer"):
                setattr(parent, name, child.base_layer)
    vars(model).pop("peft_config", None)
    model._hf_peft_config_loaded = False


# The parent


def summary(rounds: list[Data]) -> Data:
    """Of each way to load: seconds and their ratios, of rounds after the first one of the processes."""
    found: Data = {}
    for how in HOW:
        own = [entry for entry in rounds if entry["how"] == how]
        steady = [entry for entry in own if not entry["first"] and all(entry[side]["error"] is None for side in SIDES)]
        data: Data = {"first_s": {side: entry[side].get("seconds") for entry in own[:1] for side in SIDES}}
        for unit in ("seconds", "cpu_s") if steady else ():
            ratios = [entry["ours"][unit] / entry["upstream"][unit] for entry in steady]
            medians = {side: statistics.median(entry[side][unit] for entry in steady) for side in SIDES}
            data[unit] = {**medians, "ratio": common.spread(ratios)}
        if steady:
            data["goal"] = {"ratio": GOAL, "reached": data["seconds"]["ratio"]["median"] <= GOAL}
        found[how] = data
    return found


def problems(shape: str, rounds: list[Data]) -> list[str]:
    found = []
    for number, entry in enumerate(rounds):
        where = f"{shape}, round {number}, {entry['how']}"
        errors = [f"{where}, {side}: {entry[side]['error']}" for side in SIDES if entry[side]["error"] is not None]
        found += errors
        for what in () if errors else ("left", "random_state"):
            if entry["ours"][what] != entry["upstream"][what]:
                found.append(f"{where}: {what} is not that of upstream")
    return found


def measure(
    shapes: list[str], result: Data, *, out: Path | None, minutes: float, rounds: int, work: Path | None
) -> None:
    """``result`` gets each shape as soon as it is measured, and ``out`` is written after each round."""
    script = Path(__file__)
    deadline = time.monotonic() + 60 * minutes
    with common.temporary("adapter-whole-", work) as folder, common.workers(script, folder) as start:
        sides = {side: start(shim) for side, shim in SIDES.items()}
        for worker in sides.values():
            worker.wait()
        for index, shape in enumerate(shapes):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(shapes) - index)
            order = {"shape": shape, "folder": str(folder)}
            built = sides["upstream"]({"do": "build", **order})
            if built["error"] is not None:
                result["not_run"].append(f"{shape}: {built['error']}")
                continue
            result["machine"] = built.pop("machine")
            done: list[Data] = []
            longest = 0.0
            for number in range((rounds + 1) * len(HOW)):
                if time.monotonic() + longest > until:
                    result["not_run"].append(f"{shape}: rounds from {number} on")
                    break
                began = time.monotonic()
                entry: Data = {"how": HOW[number % len(HOW)], "first": number < len(HOW)}
                for side in list(sides) if number // len(HOW) % 2 else list(sides)[::-1]:
                    entry[side] = sides[side]({"do": "load", "how": entry["how"], **order})
                if number:  # the first one builds the models
                    longest = max(longest, time.monotonic() - began)
                done.append(entry)
                result["shapes"][shape] = {**built, "summary": summary(done), "rounds": done}
                result["problems"] = [
                    *(text for text in result["problems"] if not text.startswith(f"{shape},")),
                    *problems(shape, done),
                ]
                common.write(result, out)
            for how, data in summary(done).items():
                if "seconds" in data:
                    print(f"{shape:<5} {how:<13} {line(data)}", flush=True)
    common.write(result, out)


def line(data: Data) -> str:
    parts = []
    for unit, name in (("seconds", "wall"), ("cpu_s", "CPU")):
        of = data[unit]
        parts.append(f"{name} {of['ours']:.3f} s of {of['upstream']:.3f} s: {of['ratio']['median']:.2f}")
    return ", ".join(parts) + f" ({data['seconds']['ratio']['of']} rounds)"


ACTIONS: dict[str, Callable[[Order], Data]] = {"build": build, "load": load}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, (), minutes=1.6)
    shape = next(action for action in parser._actions if action.dest == "shape")
    shape.choices, shape.help = None, f"some of {', '.join(SHAPES)}, separated by commas"
    parser.add_argument("--rounds", type=int, default=6, help="of each way to load, after the first one (6)")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    shapes = (arguments.shape or "").split(",")
    if unknown := [name for name in shapes if name not in SHAPES]:
        parser.error(f"--shape: unknown {unknown}")
    result = common.header(
        Path(__file__), sys.modules[__name__], arguments.shape, common.shown(arguments), arguments.note
    )
    result["shapes"] = {}
    measure(
        shapes,
        result,
        out=arguments.out,
        minutes=arguments.minutes,
        rounds=arguments.rounds,
        work=arguments.work,
    )
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
